"""Sharding rules of gather and scatter along one dim, with an index per element that is read or written.

The dim itself may be sharded: a gather gives zero for elements of other ranks, so that the result is `P(sum)`; a
scatter skips them. This covers cross-entropy and its gradient with a sharded vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from passes.ir.call import Call, Tensor
from passes.ir.graph import tensor_of
from passes.rules.local_forms.masked import (
    is_split,
    local_index,
    moved,
    unchanged,
    with_spare_slot,
    without_spare_slot,
    zero_where,
)
from passes.rules.rule import Dims, Linear, LocalCall, Space, register

aten = torch.ops.aten

_NUMBERED = frozenset({"v"})  # the factor of the dim that is indexed


def _factors(call: Call, dim: int, *others: Tensor) -> tuple[dict[str, int], tuple[Dims, ...], set[str]]:
    """Return sizes, the dims of the indexed tensor and of `others` (the index first), and the factors needed whole.

    On dims other than `dim`, a tensor may be longer than its index, which then covers its beginning: such a dim is
    whole.
    """
    value = call.args[0]
    assert isinstance(value, Tensor)
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    dims: list[list[tuple[str, ...]]] = [[] for _ in range(1 + len(others))]
    for d in range(value.ndim):
        lengths = [value.shape[d], *(other.shape[d] for other in others)]
        shared = "v" if d == dim else f"c{d}"
        sizes[shared] = value.shape[d]
        dims[0].append((shared,))
        if d == dim or len(set(lengths)) > 1:
            own = f"i{d}"
            sizes[own] = lengths[1]
            even = len(set(lengths[1:])) == 1
            blocked |= {own} if d != dim or not even else set()
            blocked |= {shared} if d != dim else set()
            for tensor, length in zip(dims[1:], lengths[1:], strict=True):
                tensor.append((own,) if length == lengths[1] else (_whole(sizes, blocked, length),))
        else:
            for tensor in dims[1:]:
                tensor.append((shared,))
    return sizes, tuple(tuple(each) for each in dims), blocked


def _whole(sizes: dict[str, int], blocked: set[str], length: int) -> str:
    name = f"whole{length}"
    sizes[name] = length
    blocked.add(name)
    return name


def _gather(call: Call) -> Space | None:
    value, dim, index = call.args
    if not value.ndim or not index.ndim:
        return None
    sizes, (indexed, picked), blocked = _factors(call, dim % value.ndim, index)
    if value.dtype == torch.bool:
        blocked.add("v")  # booleans have no sum
    linear = (Linear((0,), moved(value.dtype)),)
    return Space(sizes, (indexed, picked), (picked,), frozenset(blocked), linear=linear, numbered=_NUMBERED)


def _gather_local(call: LocalCall) -> Node:
    value, dim, index = call.args
    shape = call.call.args[0].shape
    dim %= len(shape)
    layout = call.operand_layout(0)
    if not is_split(layout, dim):
        return unchanged(call)
    local = local_index(call, index, layout, dim, shape[dim])
    return zero_where(call, call.emit(aten.gather.default, value, dim, local.with_others_at(call, 0)), local.outside)


register(aten.gather.default, space=_gather, local=_gather_local)


def _scatter_value(call: Call) -> Space | None:
    value, dim, index, written = call.args
    if not value.ndim or not index.ndim:
        return None
    dim %= value.ndim
    sizes, (indexed, picked), blocked = _factors(call, dim, index)
    # A sum over the ranks would add the written value once per rank.
    passing = tuple(op for op in moved(value.dtype) if written == 0 or op in ("max", "min", "avg"))
    blocked.add(f"i{dim}")
    linear = (Linear((0,), passing),)
    return Space(sizes, (indexed, picked), (indexed,), frozenset(blocked), linear=linear, numbered=_NUMBERED)


def _scatter_src(call: Call) -> Space | None:
    value, dim, index, source = call.args
    if not value.ndim or not index.ndim:
        return None
    dim %= value.ndim
    sizes, (indexed, picked, written), blocked = _factors(call, dim, index, source)
    blocked.add(f"i{dim}")
    linear = (Linear((0, 2), moved(value.dtype)),)
    operands = indexed, picked, written
    return Space(sizes, operands, (indexed,), frozenset(blocked), linear=linear, numbered=_NUMBERED)


def _scatter_add(call: Call) -> Space | None:
    value, dim, index, source = call.args[:4]
    if not value.ndim or not index.ndim:
        return None
    dim %= value.ndim
    sizes, operands, blocked = _factors(call, dim, index, source)
    return Space(
        sizes,
        operands,
        operands[:1],
        frozenset(blocked),
        linear=(Linear((0, 2)),),
        partial_operands={f"i{dim}": (0,)},
        numbered=_NUMBERED,
    )


_PASSING = {"sum": ("sum",), "mean": ("sum",), "amax": ("max",), "amin": ("min",), "prod": ()}


def _scatter_reduce(call: Call) -> Space | None:
    if call.args[4] == "sum" and call.arg("include_self"):
        return _scatter_add(call)
    plain = _scatter_src(Call(call.op, call.args[:4], {}, call.results))
    if plain is None:
        return None
    passing = _PASSING[call.args[4]]
    linear = (Linear((0, 2), passing),) if passing else ()
    return replace(plain, linear=linear)


def _index_reduce(call: Call) -> Space | None:
    """Return the space of a reduction into the slices of `dim` that a list names; the other dims may be sharded."""
    value, dim, _, source = call.args[:4]
    if not value.ndim:
        return None
    dim %= value.ndim
    sizes = {f"c{d}": size for d, size in enumerate(value.shape)} | {"i": source.shape[dim]}
    target = tuple((f"c{d}",) for d in range(value.ndim))
    added = (*target[:dim], ("i",), *target[dim + 1 :])
    return Space(sizes, (target, (("i",),), added), (target,), frozenset({f"c{dim}", "i"}))


def _scatter_local(call: LocalCall) -> Node:
    value, dim, index = call.args[:3]
    shape = call.call.args[0].shape
    dim %= len(shape)
    layout = call.operand_layout(0)
    if not is_split(layout, dim):
        return unchanged(call)
    if call.call.op is aten.scatter.value and _is_one_per_line(call, dim):
        return _filled_where_indexed(call, dim)
    # Writes to elements of other ranks go to a spare slot, which is cut off afterwards.
    local = local_index(call, index, layout, dim, shape[dim]).with_others_at(call, tensor_of(value).shape[dim])
    written = call.emit(call.call.op, with_spare_slot(call, value, dim), dim, local, *call.args[3:], **call.kwargs)
    return without_spare_slot(call, written, dim)


def _is_one_per_line(call: LocalCall, dim: int) -> bool:
    """Return whether the index has size 1 on `dim` and full size on the other dims, so that a comparison replaces
    it."""
    value, index = call.call.args[0], call.call.args[2]
    return all(i == (1 if d == dim else size) for d, (i, size) in enumerate(zip(index.shape, value.shape, strict=True)))


def _filled_where_indexed(call: LocalCall, dim: int) -> Node:
    """Fill one element per line by a pointwise comparison, which can be fused."""
    value, _, index, written = call.args
    shape = call.call.args[0].shape
    positions = call.positions(call.operand_layout(0), dim, shape[dim])
    line = [-1 if d == dim else 1 for d in range(len(shape))]
    hit = call.emit(aten.eq.Tensor, index, call.emit(aten.view.default, positions, line))
    if not call.call.result.dtype.is_floating_point:
        written = int(written)
    return call.emit(aten.masked_fill.Scalar, value, hit, written)


register(aten.scatter.value, space=_scatter_value, local=_scatter_local)
register(aten.scatter.src, space=_scatter_src, local=_scatter_local)
register(aten.scatter_add.default, space=_scatter_add, local=_scatter_local)
register(aten.index_reduce.default, space=_index_reduce)
register(aten.scatter_reduce.two, space=_scatter_reduce, local=_scatter_local)
