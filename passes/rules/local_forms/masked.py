"""Lookups of global indices on a sharded dim: the local index, and a mask of the elements that other ranks hold.

Gather, scatter and embedding share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.ir.layout import PARTIAL_OPS, Layout, Shard
from passes.rules.rule import LocalCall

aten = torch.ops.aten


def moved(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that commute with an op that only moves elements of `dtype`."""
    if dtype == torch.bool:
        return ()
    if dtype.is_complex:
        return ("sum", "avg", "product")
    return PARTIAL_OPS if dtype.is_floating_point else ("sum", "max", "min", "product")


def is_split(layout: Layout, dim: int) -> bool:
    """Return whether some axis shards `dim`."""
    return bool(layout.axes_on(dim))


@dataclass(frozen=True)
class LocalIndex:
    """An index into this rank's part of a sharded dim, and masks of its shape."""

    index: Node
    outside: Node  # true where another rank holds the element
    beyond: Node | None  # true where no rank holds an element of that number; None: every number names one
    size: int  # of this rank's part

    def with_others_at(self, call: LocalCall, slot: int) -> Node:
        """Return the index with `slot`, at most `size`, for elements of other ranks.

        Numbers that name no element are beyond the part and a spare slot at its end, so that the op fails as it does with
        the whole.
        """
        index = call.emit(aten.masked_fill.Scalar, self.index, self.outside, slot)
        return index if self.beyond is None else call.emit(aten.masked_fill.Scalar, index, self.beyond, self.size + 1)


def local_index(
    call: LocalCall, index: Node, layout: Layout, dim: int, size: int, *, is_checked: bool = True
) -> LocalIndex:
    """Return the index into this rank's part of a sharded dim of global `size`.

    `index` holds global indices, of any shape, all in `[0, size)` unless they are to be checked. The digits of the sharding
    axes are removed from the index, innermost first.
    """
    beyond = None
    if is_checked:
        below, above = call.emit(aten.lt.Scalar, index, 0), call.emit(aten.ge.Scalar, index, size)
        beyond = call.emit(aten.bitwise_or.Tensor, below, above)
    outside: Node | None = None
    for axis in reversed(layout.axes_on(dim)):
        placement = layout.on(axis)
        assert isinstance(placement, Shard)
        ranks = call.mesh.sizes[axis]
        part = size // (placement.outer * ranks)
        index, missed = _take_digit(call, index, _place(call, index, axis), placement, ranks, part)
        outside = missed if outside is None else call.emit(aten.bitwise_or.Tensor, outside, missed)
        size //= ranks
    assert outside is not None, f"no axis shards dim {dim}"
    return LocalIndex(index, outside, beyond, size)


def _take_digit(call: LocalCall, index: Node, place: Node, digit: Shard, ranks: int, part: int) -> tuple[Node, Node]:
    """Return `index` without the digit of one axis, and a mask that is true where that digit is another rank's."""
    if digit.outer == 1:
        local = call.emit(aten.sub.Tensor, index, call.emit(aten.mul.Tensor, place, part))
        below = call.emit(aten.lt.Scalar, local, 0)
        above = call.emit(aten.ge.Scalar, local, part)
        return local, call.emit(aten.bitwise_or.Tensor, below, above)
    block = call.emit(aten.div.Tensor_mode, index, part, rounding_mode="floor")
    before = call.emit(aten.div.Tensor_mode, block, ranks, rounding_mode="floor")
    place = mirrored(call, place, before, digit.mirror, ranks)
    missed = call.emit(aten.ne.Tensor, call.emit(aten.remainder.Scalar, block, ranks), place)
    inside = call.emit(aten.remainder.Scalar, index, part)
    return call.emit(aten.add.Tensor, call.emit(aten.mul.Tensor, before, part), inside), missed


def mirrored(call: LocalCall, place: Node, outside: Node, mirror: int, ranks: int) -> Node:
    """Return the digit of an axis on which this rank is at `place`, where the digits before it have the value `outside`.

    `mirror` is that of the digit: see `Shard.place`.
    """
    if not mirror:
        return place
    half = call.emit(aten.div.Tensor_mode, outside, mirror, rounding_mode="floor") if mirror > 1 else outside
    is_second = call.emit(aten.eq.Scalar, call.emit(aten.remainder.Scalar, half, 2), 1)
    return call.emit(aten.where.self, is_second, call.emit(aten.rsub.Scalar, place, ranks - 1), place)


def _place(call: LocalCall, index: Node, axis: int) -> Node:
    """Return this rank's coordinate, in a shape that broadcasts to that of `index`."""
    coordinate = call.coordinate(axis)
    return coordinate if tensor_of(index).dim() else call.emit(aten.squeeze.dim, coordinate, 0)


def wrapped(call: LocalCall, index: Node, size: int) -> Node:
    """Return `index` with negative indices counted from the end, as in `x[index]`."""
    negative = call.emit(aten.lt.Scalar, index, 0)
    return call.emit(aten.where.self, negative, call.emit(aten.add.Tensor, index, size), index)


def zero_where(call: LocalCall, value: Node, mask: Node) -> Node:
    """Return `value` with zeros where `mask` is true; they broadcast together."""
    return call.emit(aten.masked_fill.Scalar, value, mask, 0)


def unsqueezed(call: LocalCall, value: Node, dims: int) -> Node:
    """Append `dims` dims of size 1 to `value`."""
    for _ in range(dims):
        value = call.emit(aten.unsqueeze.default, value, -1)
    return value


def unchanged(call: LocalCall) -> Node:
    """Return the same call on per-device operands."""
    return call.emit(call.call.op, *call.args, **call.kwargs)


def with_spare_slot(call: LocalCall, value: Node, dim: int) -> Node:
    """Append one element on `dim` to `value`, the target of writes that this rank must not make."""
    tensor = tensor_of(value)
    pad = [0, 0] * (tensor.dim() - dim - 1) + [0, 1]
    return call.emit(aten.constant_pad_nd.default, value, pad, 0)


def without_spare_slot(call: LocalCall, value: Node, dim: int) -> Node:
    """Cut off what `with_spare_slot` appended."""
    return call.emit(aten.slice.Tensor, value, dim, 0, tensor_of(value).shape[dim] - 1)
