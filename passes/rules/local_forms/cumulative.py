"""Local forms of cumulative sums along a sharded dim: a rank sums its part, and adds the sums of the parts before it.

The sums of all parts are gathered, one position each. A cumulative sum from the end adds those of the parts after it. Products
and sums of exponentials, in logarithms, are carried alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from passes._torch import REVERSED_CUMSUM, OpOverload
from passes.ir.graph import tensor_of
from passes.ir.layout import replicated
from passes.rules.rule import LocalCall, Message, remade

aten = torch.ops.aten
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SUMS = Message("sums of parts", "carry: cumulative sums of the parts before")


@dataclass(frozen=True)
class _Scan:
    """The ops that join parts: a reduction of their totals, in which `neutral` changes nothing, and a pointwise one."""

    reduce: OpOverload
    neutral: float
    join: OpOverload


_SCANS = {
    aten.cumsum.default: _Scan(aten.sum.dim_IntList, 0, aten.add.Tensor),
    REVERSED_CUMSUM: _Scan(aten.sum.dim_IntList, 0, aten.add.Tensor),
    aten.cumprod.default: _Scan(aten.prod.dim_int, 1, aten.mul.Tensor),
    aten.logcumsumexp.default: _Scan(aten.logsumexp.default, -torch.inf, aten.logaddexp.default),
}


def scanned(call: LocalCall) -> Node:
    """Return the part of a cumulative sum, or of another op of its kind."""
    value, is_reversed = call.operands[0], call.call.op is REVERSED_CUMSUM
    dim = int(call.call.arg("dim")) % max(1, tensor_of(value).dim())
    own = _from_end(call, value, dim) if is_reversed else remade(call)
    axes = call.operand_layout(0).axes_on(dim)
    if not axes:
        return own
    length = tensor_of(own).shape[dim]
    end = 0 if is_reversed else length - 1
    total = call.emit(aten.slice.Tensor, own, dim, end, end + 1) if length > 1 else own
    carry = _carried(call, total, axes[0], _SCANS[call.call.op], after=is_reversed)
    return call.emit(_SCANS[call.call.op].join, own, carry)


def _from_end(call: LocalCall, value: Node, dim: int) -> Node:
    turned = call.emit(torch.ops.prims.rev.default, value, [dim])
    return call.emit(torch.ops.prims.rev.default, call.emit(aten.cumsum.default, turned, dim), [dim])


def _carried(call: LocalCall, total: Node, axis: int, scan: _Scan, *, after: bool) -> Node:
    """Return the totals of the parts before this rank's, or after it, joined."""
    shape, ranks = list(tensor_of(total).shape), call.mesh.sizes[axis]
    dense = total
    if not tensor_of(total).is_contiguous():
        dense = call.emit(aten.clone.default, total, memory_format=torch.contiguous_format)
    row = call.emit(aten.view.default, dense, [1, *shape])
    rows = call.emit(_WAIT, call.send(_GATHER, row, ranks, axes=(axis,), message=_SUMS))
    places = call.positions(replicated(call.mesh), 0, ranks)
    is_other = call.emit((aten.le if after else aten.ge).Tensor, places, call.coordinate(axis))
    mask = call.emit(aten.view.default, is_other, [ranks, *[1] * len(shape)])
    others = call.emit(aten.masked_fill.Scalar, rows, mask, scan.neutral)
    return call.emit(scan.reduce, others, 0 if scan.reduce is aten.prod.dim_int else [0])
