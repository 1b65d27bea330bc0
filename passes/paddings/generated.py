"""Find values that are made without data along a dim, such as constants and positions: they can be made longer instead of
being padded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from passes.ir.graph import is_random, item_of, operands
from passes.ir.padding import Digit, in_dims, in_factor
from passes.ir.reached_values import all_followed
from passes.rules.rule import Space

_MADE_LONGER = (  # ops that take the size of a dim that no operand has
    torch.ops.aten.full.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.prims.iota.default,
)

SpaceOf = Callable[[Node], Space | None]


def is_generated(value: Node, dim: int, digit: Digit, space_of: SpaceOf) -> bool:
    """Return whether no element of `value` along a digit of `dim` is read from an input or parameter."""
    return all_followed((value, dim, digit), lambda one: _read_for(*one, space_of))


def _read_for(value: Node, dim: int, digit: Digit, space_of: SpaceOf) -> list[tuple[Node, int, Digit]] | None:
    """Return the operands that a call reads along a digit of `dim` of its result, each with its own dim and digit; none if it
    generates the elements. Return None if it is not known to do either."""
    if value.op != "call_function" or is_random(value) or item_of(value) is not None:
        return None
    space = space_of(value)
    at = None if space is None else in_factor(space.sizes, space.results[0], dim, digit)
    if space is None or at is None or len(space.results) != 1:
        return None
    factor, inside = at
    if not space.can_pad(factor, inside.outer):
        return None
    sources = [
        (operand, *found)
        for operand, dims in zip(operands(value), space.operands, strict=True)
        if (found := in_dims(space.sizes, dims, factor, inside)) is not None
    ]
    return sources if sources or value.target in _MADE_LONGER else None
