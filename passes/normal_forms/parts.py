"""Rewrites of parts of tensors to slices and selects, of their concatenations, and of filled tensors to `full`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of, value_of
from passes.normal_forms.rewriting import At, as_int, is_returned

aten = torch.ops.aten

Piece = tuple[Any, tuple[int, ...]]  # an op and its arguments after the operand


# --- 5: parts


def _split(at: At) -> bool:
    operand = tensor_of(at.operand)
    dim = at.arg(2, "dim", 0) % operand.dim()
    starts = [0]
    for part in value_of(at.node):
        starts.append(starts[-1] + part.shape[dim])
    pieces: list[Piece] = [(aten.slice.Tensor, (dim, start, end)) for start, end in pairwise(starts)]
    return _replace_items(at, pieces)


def _unbind(at: At) -> bool:
    dim = at.arg(1, "dim", 0) % tensor_of(at.operand).dim()
    return _replace_items(at, [(aten.select.int, (dim, i)) for i in range(len(value_of(at.node)))])


def _replace_items(at: At, pieces: list[Piece]) -> bool:
    for user in list(at.node.users):
        if user.target is not operator.getitem:
            return False
    for user in list(at.node.users):
        op, args = pieces[as_int(user.args[1])]
        place = at.at(user)
        place.replace(place.call(op, at.operand, *args))
    at.graph.erase_node(at.node)
    return True


def _cat(at: At) -> bool:
    """Drop operands without elements, as an empty cache is, which no dim can be sharded with."""
    given = at.node.args[0]
    if not isinstance(given, list | tuple):
        return False
    kept = [value for value in given if isinstance(value, Node) and tensor_of(value).numel()]
    made = tensor_of(at.node)
    if len(kept) in (0, len(given)) or any(tensor_of(value).dtype != made.dtype for value in kept):
        return False
    if len(kept) > 1:
        return at.replace(at.call(aten.cat.default, kept, *at.node.args[1:], **at.node.kwargs))
    if tensor_of(kept[0]).stride() == made.stride() and not is_returned(at.node):
        return at.replace(kept[0])
    return at.replace(at.call(aten.clone.default, kept[0], memory_format=torch.contiguous_format))


# --- 5: filled tensors


def _full(value: float | int) -> Callable[[At], bool]:
    return lambda at: _filled(at, value)


def _full_like(at: At) -> bool:
    return _filled(at, at.node.args[1])


def _filled(at: At, value: Any) -> bool:
    made = tensor_of(at.node)
    if not made.is_contiguous():
        return False
    kwargs = {"dtype": made.dtype, "device": made.device, "pin_memory": False}
    return at.replace(at.call(aten.full.default, list(made.shape), value, **kwargs))


REWRITES: dict[Any, Callable[[At], bool]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.cat.default: _cat,
    aten.full_like.default: _full_like,
    aten.zeros_like.default: _full(0),
    aten.ones_like.default: _full(1),
    aten.zeros.default: _full(0),
    aten.ones.default: _full(1),
    aten.new_zeros.default: _full(0),
    aten._efficientzerotensor.default: _full(0),  # a gradient of `sgn`, without memory: Inductor may write into it
    aten.new_ones.default: _full(1),
}
