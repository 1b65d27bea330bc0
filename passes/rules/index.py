"""Sharding rules of embedding and advanced indexing: lookups in, and writes to, the indexed dims.

An indexed dim may be sharded. A lookup then gives zero for what other ranks hold, so that the result is `P(sum)`; a
write skips it. Dims that are not indexed, and the dims of the indices, appear in the result. Adding at indices sums
over the indices' dims: if these are sharded, the result is `P(sum)`, and the tensor that is added to must be `P(sum)`
as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from passes.ir.call import Call, Tensor
from passes.ir.graph import tensor_of
from passes.rules.local_forms.masked import (
    LocalIndex,
    is_split,
    local_index,
    moved,
    unchanged,
    unsqueezed,
    with_spare_slot,
    without_spare_slot,
    wrapped,
    zero_where,
)
from passes.rules.rule import Dims, Linear, LocalCall, Space, register

aten = torch.ops.aten


@dataclass(frozen=True)
class _Lookup:
    """Factors of `value[indices]`."""

    sizes: dict[str, int]
    value: Dims
    indices: tuple[Dims, ...]  # of the index tensors, without the Nones
    result: Dims
    result_shape: tuple[int, ...]

    @property
    def index_factors(self) -> tuple[str, ...]:
        return tuple(factor for factor in self.sizes if factor.startswith("i"))

    @property
    def looked_up(self) -> tuple[str, ...]:
        return tuple(factor for factor in self.sizes if factor.startswith("v"))

    def broadcast(self, tensor: Tensor) -> Dims:
        """Return the factors of an operand that broadcasts with the result."""
        return _broadcast(tensor, self.result, self.result_shape)


def _lookup(value: Tensor, indices: Sequence[Tensor | None]) -> _Lookup | None:
    """Return the factors of a lookup; None if an index is a boolean mask, whose result shape depends on data."""
    found = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not found or any(index.dtype in (torch.bool, torch.uint8) for _, index in found):
        return None
    indexed = {dim for dim, _ in found}
    shape = _broadcast_shape([index.shape for _, index in found])
    dims = tuple((f"i{i}",) for i in range(len(shape)))
    carried = [dim for dim in range(value.ndim) if dim not in indexed]
    first = _index_position(sorted(indexed))
    before = [dim for dim in carried if dim < first]
    after = [dim for dim in carried if dim >= first]
    named = tuple((f"v{dim}" if dim in indexed else f"c{dim}",) for dim in range(value.ndim))
    result = (*(named[d] for d in before), *dims, *(named[d] for d in after))
    result_shape = (*(value.shape[d] for d in before), *shape, *(value.shape[d] for d in after))
    sizes = {names[0]: size for names, size in zip((*named, *dims), (*value.shape, *shape), strict=True)}
    return _Lookup(sizes, named, tuple(_broadcast(i, dims, shape) for _, i in found), result, result_shape)


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    ndim = max(len(shape) for shape in shapes)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _index_position(indexed: list[int]) -> int:
    """Return the first result dim of the indices: where they stood if adjacent, else 0 (as in NumPy)."""
    adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
    return indexed[0] if adjacent else 0


def _broadcast(tensor: Tensor, dims: Dims, shape: tuple[int, ...]) -> Dims:
    skip = len(shape) - tensor.ndim
    if skip < 0:
        return ((),) * -skip + _broadcast(Tensor(tensor.shape[-skip:], tensor.dtype), dims, shape)
    return tuple(dims[skip + d] if size == shape[skip + d] else () for d, size in enumerate(tensor.shape))


@dataclass(frozen=True)
class _Local:
    """Indices into this rank's part, and masks of the indices that name elements of other ranks.

    `missed` has the shape that the indices broadcast to, `outside` is the same lined up with the result. Both are None
    if no indexed dim is sharded. `split` is the index of the first dim that is.
    """

    indices: list[Node | None]
    missed: Node | None = None
    outside: Node | None = None
    split: LocalIndex | None = None


def _local_indices(call: LocalCall, indices: Sequence[Node | None]) -> _Local:
    """Return the local indices of a lookup or a write. Those of an unsafe op are valid, and so are not checked."""
    layout, shape = call.operand_layout(0), call.call.operands[0].shape
    is_checked = call.call.op in (aten.index.Tensor, aten.index_put.default)
    local, missed, split = list(indices), None, None
    for dim, index in enumerate(indices):
        if index is None or not is_split(layout, dim):
            continue
        found = local_index(call, wrapped(call, index, shape[dim]), layout, dim, shape[dim], is_checked=is_checked)
        local[dim], split = found.with_others_at(call, 0), split or found
        missed = found.outside if missed is None else call.emit(aten.bitwise_or.Tensor, missed, found.outside)
    if missed is None:
        return _Local(local)
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    first = _index_position(indexed)
    after = sum(1 for dim in range(first, len(shape)) if dim not in indexed)
    return _Local(local, missed, unsqueezed(call, missed, after), split)


def _inside(call: LocalCall, mask: Node, outside: Node | None) -> Node:
    """Return `mask` restricted to the elements that this rank holds."""
    if outside is None:
        return mask
    return call.emit(aten.bitwise_and.Tensor, mask, call.emit(aten.bitwise_not.default, outside))


# Embedding


def _embedding(call: Call) -> Space | None:
    weight, index = call.args[:2]
    found = _lookup(weight, (index,))
    if found is None:
        return None
    return _moving(found, (found.value, *found.indices), call.result, wraps=False)


def _embedding_local(call: LocalCall) -> Node:
    layout = call.operand_layout(0)
    if not is_split(layout, 0):
        return unchanged(call)
    local = local_index(call, call.args[1], layout, 0, call.call.args[0].shape[0])
    found = call.emit(aten.embedding.default, call.args[0], local.with_others_at(call, 0))
    return zero_where(call, found, unsqueezed(call, local.outside, 1))


def _embedding_backward(call: Call) -> Space | None:
    grad, index = call.args[:2]
    found = _lookup(call.result, (index,))
    if found is None:
        return None
    # Frequencies are counted over all indices and rows at once.
    blocked = (*found.index_factors, "v0") if call.arg("scale_grad_by_freq") else ()
    operands = (found.broadcast(grad), *found.indices)
    rows = frozenset(found.looked_up)
    return Space(found.sizes, operands, (found.value,), frozenset(blocked), linear=(Linear((0,)),), numbered=rows)


def _embedding_backward_local(call: LocalCall) -> Node:
    grad, index, size, padding = call.args[:4]
    layout = call.result_layout()
    if not is_split(layout, 0):
        return unchanged(call)
    local = local_index(call, index, layout, 0, size, is_checked=False)  # the forward's lookup is
    padded = call.emit(aten.eq.Scalar, index, padding)
    dropped = unsqueezed(call, call.emit(aten.bitwise_or.Tensor, local.outside, padded), 1)
    kept = zero_where(call, grad, dropped)
    return call.emit(call.call.op, kept, local.with_others_at(call, 0), call.local_shape()[0], -1, call.call.args[4])


register(aten.embedding.default, space=_embedding, local=_embedding_local)
register(aten.embedding_dense_backward.default, space=_embedding_backward, local=_embedding_backward_local)


# Lookups: x[indices]


def _moving(found: _Lookup, operands: tuple[Dims, ...], result: Tensor, *, wraps: bool) -> Space:
    """Return the space of a lookup in operand 0; `wraps` says whether a negative index counts from the end.

    The looked up dims of booleans stay whole, as booleans have no sum.
    """
    looked_up = frozenset(found.looked_up)
    blocked = looked_up if result.dtype == torch.bool else frozenset()
    linear = (Linear((0,), moved(result.dtype)),)
    unpadded = looked_up if wraps else frozenset()
    return Space(
        found.sizes, operands, (found.result,), blocked, linear=linear, numbered=looked_up, unpadded=unpadded
    )


def _index(call: Call) -> Space | None:
    found = _lookup(call.args[0], call.args[1])
    if found is None:
        return None
    return _moving(found, (found.value, *found.indices), call.result, wraps=True)


def _index_local(call: LocalCall) -> Node:
    local = _local_indices(call, call.args[1])
    found = call.emit(call.call.op, call.args[0], local.indices)
    return found if local.outside is None else zero_where(call, found, local.outside)


def _masked_index(call: Call) -> Space | None:
    value, mask, indices, fill = call.args
    found = _lookup(value, indices)
    if found is None:
        return None
    operands = (found.value, found.broadcast(mask), *found.indices)
    if fill == 0:
        return _moving(found, operands, call.result, wraps=True)
    # A sum over the ranks would add the fill once per rank.
    return Space(found.sizes, operands, (found.result,), frozenset(found.looked_up))


def _masked_index_local(call: LocalCall) -> Node:
    value, mask, indices, fill = call.args
    local = _local_indices(call, indices)
    return call.emit(call.call.op, value, _inside(call, mask, local.outside), local.indices, fill)


def _index_select(call: Call) -> Space | None:
    value, dim, index = call.args
    if not value.ndim or not index.ndim:
        return None
    found = _lookup(value, _at(dim % value.ndim, index))
    if found is None:
        return None
    return _moving(found, (found.value, *found.indices), call.result, wraps=False)


def _index_select_local(call: LocalCall) -> Node:
    value, dim, index = call.args
    shape = call.call.args[0].shape
    dim %= len(shape)
    layout = call.operand_layout(0)
    if not is_split(layout, dim):
        return unchanged(call)
    local = local_index(call, index, layout, dim, shape[dim])
    found = call.emit(call.call.op, value, dim, local.with_others_at(call, 0))
    return zero_where(call, found, unsqueezed(call, local.outside, len(shape) - dim - 1))


def _at(dim: int, index: Any) -> tuple[Any, ...]:
    return (None,) * dim + (index,)


def _bucketize(call: Call) -> Space:
    """Return a space in which each element is looked up separately, among all boundaries."""
    shape, boundaries = call.result.shape, call.arg("boundaries").shape
    dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)} | {"boundary": boundaries[0]}
    return Space(sizes, (dims, (("boundary",),)), (dims,), frozenset({"boundary"}))


def _searchsorted(call: Call) -> Space | None:
    """Return a space in which each element is looked up separately, in its row's or in the only sorted sequence."""
    shape, sequence = call.result.shape, call.arg("sorted_sequence").shape
    if not isinstance(call.arg("self"), Tensor) or call.arg("sorter") is not None:
        return None
    dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)} | {"sorted": sequence[-1]}
    rows = dims[:-1] if len(sequence) > 1 else ()
    return Space(sizes, ((*rows, ("sorted",)), dims), (dims,), frozenset({"sorted"}))


register(aten.bucketize.Tensor, space=_bucketize)
register(aten.searchsorted.Tensor, space=_searchsorted)
register(aten.index.Tensor, aten._unsafe_index.Tensor, space=_index, local=_index_local)
register(aten._unsafe_masked_index.default, space=_masked_index, local=_masked_index_local)
register(aten.index_select.default, space=_index_select, local=_index_select_local)


# Writes: x[indices] = values, x[indices] += values


def _index_put(call: Call) -> Space | None:
    value, indices, values = call.args[:3]
    found = _lookup(value, indices)
    if found is None:
        return None
    operands = (found.value, *found.indices, found.broadcast(values))
    last = len(operands) - 1
    if call.arg("accumulate"):
        return _adding(found, operands, (0, last))
    blocked = frozenset(found.index_factors)
    linear = (Linear((0, last), moved(call.result.dtype)),)
    unpadded = frozenset(found.looked_up)
    return Space(found.sizes, operands, (found.value,), blocked, linear=linear, unpadded=unpadded)


def _adding(found: _Lookup, operands: tuple[Dims, ...], linear: tuple[int, ...]) -> Space:
    accumulator = dict.fromkeys(found.index_factors, (0,))
    unpadded = frozenset(found.looked_up)
    return Space(
        found.sizes, operands, (found.value,), linear=(Linear(linear),), partial_operands=accumulator, unpadded=unpadded
    )


def _index_put_local(call: LocalCall) -> Node:
    value, indices, values = call.args[:3]
    accumulate = call.call.arg("accumulate")
    local = _local_indices(call, indices)
    if local.missed is None or local.outside is None or local.split is None:
        return unchanged(call)
    if accumulate:
        kept = zero_where(call, values, local.outside)
        return call.emit(call.call.op, value, local.indices, kept, accumulate)
    # Writes to elements of other ranks go to a spare slot, which is cut off afterwards.
    layout = call.operand_layout(0)
    dim = next(d for d, index in enumerate(indices) if index is not None and is_split(layout, d))
    missed = replace(local.split, outside=local.missed)
    local.indices[dim] = missed.with_others_at(call, tensor_of(value).shape[dim])
    written = call.emit(call.call.op, with_spare_slot(call, value, dim), local.indices, values, accumulate)
    return without_spare_slot(call, written, dim)


def _masked_index_put(call: Call) -> Space | None:
    value, mask, indices, values = call.args
    found = _lookup(value, indices)
    if found is None:
        return None
    operands = (found.value, found.broadcast(mask), *found.indices, found.broadcast(values))
    return _adding(found, operands, (0, len(operands) - 1))


def _masked_index_put_local(call: LocalCall) -> Node:
    value, mask, indices, values = call.args
    local = _local_indices(call, indices)
    return call.emit(call.call.op, value, _inside(call, mask, local.outside), local.indices, values)


register(aten.index_put.default, aten._unsafe_index_put.default, space=_index_put, local=_index_put_local)
register(aten._unsafe_masked_index_put_accumulate.default, space=_masked_index_put, local=_masked_index_put_local)
