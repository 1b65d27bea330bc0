"""The placements of what a graph returns, and those that parameters give their gradients."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from passes.ir.graph import (
    OPTIONS,
    InputRole,
    Output,
    OutputRole,
    input_of,
    is_reshard,
    is_tensor,
    operands,
    outputs_of,
    placeholders,
    returned,
)
from passes.ir.layout import Placement, R, Shard
from passes.ir.padding import CUT_END
from passes.propagation.axis import Axis
from passes.recipes.weights import resized_form
from passes.rules.rule import row_giving


def output_needs(axis: Axis) -> tuple[Placement, ...]:
    """Return the placements of all results: outputs by `output_placement`, gradients and buffers as they are stored."""
    return tuple(
        output_placement(axis, value)
        if output.role is OutputRole.OUTPUT
        else _stored(axis, output)
        for value, output in _returned(axis)
    )


def output_placement(axis: Axis, value: Node) -> Placement:
    """Return the placement of an output: the user's; else this rank's part on a data axis, whole on the others."""
    placement = axis.of(value)
    if is_reshard(value) and axis.pinned_by(value) == OPTIONS:
        return placement
    return placement if isinstance(placement, Shard) and axis.is_data else R


def output_of_tangent(axis: Axis, tangent: Node) -> Node:
    """Return the output that `tangent` is the gradient of."""
    name = input_of(tangent).name
    found = (value for value, output in _returned(axis) if output.role is OutputRole.OUTPUT and output.name == name)
    return next(found)


def wanted_shardings(axis: Axis) -> dict[Node, Placement]:
    """Return the shardings of gradients that parameters determine, and of the values that gradients are moved or added
    from."""
    wanted: dict[Node, Placement] = {}
    for value, output in _returned(axis):
        if output.role is OutputRole.GRADIENT:
            _want(axis, value, _computed(axis, output.name), wanted)
    return wanted


def _returned(axis: Axis) -> Iterator[tuple[Node, Output]]:
    """Yield the tensors that the graph returns."""
    for value, output in zip(returned(axis.gm.graph), outputs_of(axis.gm.graph), strict=True):
        if isinstance(value, Node) and is_tensor(value):
            yield value, output


def _want(axis: Axis, value: Node, placement: Placement | None, wanted: dict[Node, Placement]) -> None:
    if not isinstance(placement, Shard) or value in wanted or value.op == "placeholder":
        return
    if is_reshard(value):
        _want(axis, operands(value)[0], placement, wanted)
        return
    wanted[value] = placement
    if value.target is CUT_END and placement.dim != value.args[1]:  # it is stored otherwise than it is used
        return
    space = axis.placed.space_of(value)
    everything = set(range(len(operands(value))))
    if space is None or not any(set(linear.operands) == everything for linear in space.linear):
        return
    row = row_giving(space, 0, placement, axis.size)
    if row is not None:
        for operand, need in zip(operands(value), row.operands, strict=True):
            _want(axis, operand, need, wanted)


def _computed(axis: Axis, name: str) -> Placement | None:
    """Return the placement with which a parameter is used (it may be stored otherwise)."""
    node = next((n for n in placeholders(axis.gm.graph, InputRole.PARAMETER) if input_of(n).name == name), None)
    if node is None:
        return None
    value = node
    while len(value.users) == 1 and (user := next(iter(value.users))) in axis.weights:
        if is_reshard(user):
            used = None if resized_form(value, axis.weights) else axis.pinned(user)
            return used or axis.pinned(node)
        value = user
    return axis.pinned(node)


def _stored(axis: Axis, output: Output) -> Placement:
    for node in placeholders(axis.gm.graph):
        if input_of(node) == output.partner:
            return axis.pinned(node) or R
    raise AssertionError(f"{output.role.value} of unknown {output.name}")
