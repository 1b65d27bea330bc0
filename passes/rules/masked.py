"""Global indices on a sharded dim: the index in this rank's part, and where there is none.

Gather, scatter and embedding on a sharded dim are lookups that each rank does for the part it holds.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.ir.layout import PARTIAL_OPS, Layout, Shard
from passes.rules.rule import LocalCall

aten = torch.ops.aten


def moved(dtype: torch.dtype) -> tuple[str, ...]:
    """Reductions of partial values that an op which only moves elements of `dtype` lets through."""
    if dtype == torch.bool:
        return ()
    if dtype.is_complex:
        return ("sum", "avg", "product")
    return PARTIAL_OPS if dtype.is_floating_point else ("sum", "max", "min", "product")


def is_split(layout: Layout, dim: int) -> bool:
    """Whether some axis shards `dim`."""
    return bool(layout.axes_on(dim))


def masked_index(call: LocalCall, index: Node, layout: Layout, dim: int, size: int) -> tuple[Node, Node]:
    """Index into this rank's part of a sharded dim of global `size`, and the mask of what it does not hold.

    `index` holds global indices in `[0, size)`, of any shape. The local index of an element that another
    rank holds is 0. The digits of the sharding axes are taken out of the index, innermost first.
    """
    outside: Node | None = None
    for axis in reversed(layout.axes_on(dim)):
        placement = layout.on(axis)
        assert isinstance(placement, Shard)
        ranks = call.mesh.sizes[axis]
        part = size // (placement.outer * ranks)
        index, missed = _take_digit(call, index, _place(call, index, axis), placement.outer, ranks, part)
        outside = missed if outside is None else call.emit(aten.bitwise_or.Tensor, outside, missed)
        size //= ranks
    assert outside is not None, f"no axis shards dim {dim}"
    return call.emit(aten.masked_fill.Scalar, index, outside, 0), outside


def _take_digit(call: LocalCall, index: Node, place: Node, outer: int, ranks: int, part: int) -> tuple[Node, Node]:
    """`index` without the digit of one axis, and where that digit is not this rank's."""
    if outer == 1:
        local = call.emit(aten.sub.Tensor, index, call.emit(aten.mul.Tensor, place, part))
        below = call.emit(aten.lt.Scalar, local, 0)
        above = call.emit(aten.ge.Scalar, local, part)
        return local, call.emit(aten.bitwise_or.Tensor, below, above)
    block = call.emit(aten.div.Tensor_mode, index, part, rounding_mode="floor")
    missed = call.emit(aten.ne.Tensor, call.emit(aten.remainder.Scalar, block, ranks), place)
    before = call.emit(aten.div.Tensor_mode, block, ranks, rounding_mode="floor")
    inside = call.emit(aten.remainder.Scalar, index, part)
    return call.emit(aten.add.Tensor, call.emit(aten.mul.Tensor, before, part), inside), missed


def _place(call: LocalCall, index: Node, axis: int) -> Node:
    """This rank's coordinate, in a shape that leaves that of `index` as it is."""
    coordinate = call.coordinate(axis)
    return coordinate if tensor_of(index).dim() else call.emit(aten.squeeze.dim, coordinate, 0)


def wrapped(call: LocalCall, index: Node, size: int) -> Node:
    """`index` with negative indices counted from the end, as `x[index]` does."""
    negative = call.emit(aten.lt.Scalar, index, 0)
    return call.emit(aten.where.self, negative, call.emit(aten.add.Tensor, index, size), index)


def zero_where(call: LocalCall, value: Node, mask: Node) -> Node:
    """`value` with zeros where `mask` is true; they broadcast together."""
    return call.emit(aten.masked_fill.Scalar, value, mask, 0)


def unsqueezed(call: LocalCall, value: Node, dims: int) -> Node:
    """`value` with `dims` dims of size 1 appended."""
    for _ in range(dims):
        value = call.emit(aten.unsqueeze.default, value, -1)
    return value


def unchanged(call: LocalCall) -> Node:
    """The call itself, on per-device operands."""
    return call.emit(call.call.op, *call.args, **call.kwargs)


def with_spare_slot(call: LocalCall, value: Node, dim: int) -> Node:
    """`value` with one element appended on `dim`, for writes that this rank must not make."""
    tensor = tensor_of(value)
    pad = [0, 0] * (tensor.dim() - dim - 1) + [0, 1]
    return call.emit(aten.constant_pad_nd.default, value, pad, 0)


def without_spare_slot(call: LocalCall, value: Node, dim: int) -> Node:
    """Inverse of `with_spare_slot`."""
    return call.emit(aten.slice.Tensor, value, dim, 0, tensor_of(value).shape[dim] - 1)
