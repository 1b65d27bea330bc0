"""Find which factors of a call are padded, where that puts padding, and what padding has to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from passes._torch import OpOverload
from passes.ir.graph import operands, tensor_of
from passes.ir.padding import Digit, Dims, Padding, in_dims, in_factor
from passes.paddings.padded_values import PaddedValues
from passes.propagation.partial_sums import is_zero
from passes.rules.rule import Space

aten = torch.ops.aten

Paddings = dict[str, tuple[Digit, int]]  # by factor: the digit that is padded, and its new size


def padded_factors(node: Node, space: Space, values: PaddedValues, forced: Paddings) -> Paddings:
    """Return the factors of a call that are padded, as its operands are and as `forced`."""
    found: Paddings = dict(forced)
    for value, dims in zip(operands(node), space.operands, strict=True):
        for padding in values.of(value):
            at = in_factor(space.sizes, dims, padding.dim, padding.digit)
            if at is not None and space.can_pad(at[0], at[1].outer):
                found.setdefault(at[0], (at[1], padding.padded))
    for dims in (*space.operands, *space.results):  # of each dim, one factor at most
        for dim in dims:
            for other in [factor for factor in dim if factor in found][1:]:
                del found[other]
    return found


def paddings_of(space: Space, dims: Dims, factors: Paddings) -> dict[str, Padding]:
    """Return the paddings of an operand or result, by factor."""
    found = {}
    for factor, (digit, padded) in factors.items():
        placed = in_dims(space.sizes, dims, factor, digit)
        if placed is not None:
            found[factor] = Padding(*placed, padded)
    return found


def longer(shape: tuple[int, ...], paddings: Iterable[Padding]) -> tuple[int, ...]:
    """Return a shape with padding."""
    lengths = {padding.dim: padding.length for padding in paddings}
    return tuple(lengths.get(dim, size) for dim, size in enumerate(shape))


def fill_of(node: Node, space: Space, factor: str, number: int, dtype: torch.dtype) -> float | int | None:
    """Return what the padding of an operand, given by its number, must be; None if that does not matter."""
    if number in space.masks:
        is_row = any(factor in dim for dim in space.results[0])
        return None if is_row else False if dtype is torch.bool else float("-inf")
    if all(any(factor in dim for dim in dims) for dims in space.results):
        is_index = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        return 0 if is_index and torch.Tag.pointwise not in _tags(node) else None
    op = space.reductions.get(factor, "sum")
    if dtype is torch.bool:  # a number in its place would make the operand one of numbers
        return op in ("product", "min")
    if op not in ("max", "min"):
        return 1 if op == "product" else 0
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    lowest = float("-inf") if dtype.is_floating_point else limits.min
    greatest = float("inf") if dtype.is_floating_point else limits.max
    return lowest if op == "max" else greatest


def makes_zeros(
    node: Node, space: Space, factor: str, new: Sequence[Node], factors: Paddings, values: PaddedValues
) -> bool:
    """Return whether the results of a call on `new` operands have zeros where `factor` is padded."""
    carrying = {i for i, dims in enumerate(space.operands) if any(factor in dim for dim in dims)}
    if not carrying:
        return node.target is aten.embedding_dense_backward.default or is_zero(node)
    for i in carrying:
        padding = paddings_of(space, space.operands[i], factors)[factor]
        if not values.of(new[i])[padding]:
            return False
    is_pointwise = torch.Tag.pointwise in _tags(node)
    if any(one.operands and set(one.operands) <= carrying and "sum" in one.ops for one in space.linear):
        return not is_pointwise or _is_zero_at_zero(node, carrying)  # 0 / 0 is not zero
    return len(carrying) == len(new) and is_pointwise and _is_zero_at_zero(node, carrying)


def _is_zero_at_zero(node: Node, zeros: set[int]) -> bool:
    """Return whether a pointwise call gives zero if the operands `zeros` are zero and the others are one."""
    places = {id(value): float(i not in zeros) for i, value in enumerate(operands(node))}

    def number(value: Node) -> torch.Tensor:
        return torch.full((), places[id(value)]).to(tensor_of(value).dtype)

    args, kwargs = map_arg((node.args, node.kwargs), number)
    assert callable(node.target)
    made = node.target(*args, **kwargs)
    return isinstance(made, torch.Tensor) and not bool(made)


def _tags(node: Node) -> Sequence[torch.Tag]:
    return node.target.tags if isinstance(node.target, OpOverload) else ()
