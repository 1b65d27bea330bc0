"""Propagate layouts from pinned values along the data flow, by the sharding rules and without a cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.graph import (
    InputRole,
    Pin,
    Stage,
    add_pin,
    add_reshard,
    input_of,
    is_reshard,
    item_of,
    operands,
    placeholders,
    results_of,
)
from passes.ir.layout import Placement, R
from passes.ir.propagation_edges import Edge
from passes.propagation.axis import Axis
from passes.propagation.choice import Call, choose
from passes.propagation.partial_sums import reduction
from passes.propagation.placed import Placed
from passes.propagation.returned import output_needs, output_of_tangent, output_placement, wanted_shardings
from passes.recipes.context_parallel import repeated_work
from passes.rules.attention import is_attention
from passes.rules.rule import Row


@dataclass(frozen=True)
class Propagate(Pass):
    """Give every value a layout and every operand a needed layout, one axis after the other.

    On each axis, in program order, a node takes the first of these rows of its rule:

    1. For a gradient: the row that gives the sharding with which its parameter is used.
    2. A row whose placements the operands already have.
    3. A row that the operands reach without communication, as a replicated one takes its part.
    4. If operands conflict: the row that keeps a sharded parameter in place, then moves the fewest bytes, then keeps
       the placement of the first operand. A remark says what moved.
    5. Without a rule or a row: replicated, with a remark.

    A partial value stays partial through ops that only move it and sums of partial values. If it has several users, it
    is reduced once, before them: to the sharding that they need, else to `R`.

    Before:

        mesh tp=2
        stage CAPTURED
        %w: f32[8, 6] pinned(tp:S(0) "params") = parameter("w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 6] = mm(%x, %w)
        %relu: f32[4, 6] = relu(%mm)
        return output("output") %relu

    After:

        mesh tp=2
        stage PLACED
        %w: f32[8, 6] {tp:S(0)} pinned(tp:S(0) "params") = parameter("w")
        %x: f32[4, 8] {tp:R} = input("x")
        %mm: f32[4, 6] {tp:P(sum)} = mm(%x{tp:S(1)}, %w)
        %relu: f32[4, 6] {tp:R} = relu(%mm{tp:R})
        return output("output") %relu
    """

    name: ClassVar[str] = "propagate"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.PLACED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        placed = Placed(gm, ctx)
        for axis in placed.order:
            _propagate(Axis(self, gm, ctx, placed, axis))
        placed.write()
        return True


def _propagate(axis: Axis) -> None:
    """Place every node on one axis, in program order, including the reshards that are added on the way."""
    wanted = wanted_shardings(axis)
    for node in list(axis.gm.graph.nodes):
        if node.op == "placeholder":
            _place_input(axis, node)
        elif node.op == "output":
            _place_tangents(axis, placeholders(axis.gm.graph, InputRole.TANGENT))  # that nothing reads
            axis.placed.needs.setdefault(node, []).append(output_needs(axis))
        elif is_reshard(node):
            _place_reshard(axis, node)
        elif results_of(node):
            _place_call(axis, node, wanted.get(node))
            _reduce(axis, node)


def _place_input(axis: Axis, node: Node) -> None:
    if input_of(node).role is not InputRole.TANGENT:
        axis.give(node, (), (axis.pinned(node) or R,))
        axis.log(node, None, axis.pinned_by(node))


def _place_tangents(axis: Axis, values: tuple[Node, ...]) -> None:
    """Place gradients of outputs at their first use, when their outputs have been placed."""
    for value in values:
        if value not in axis.at:
            assert input_of(value).role is InputRole.TANGENT, value
            output = output_of_tangent(axis, value)
            axis.give(value, (), (output_placement(axis, output),))
            axis.log(value, output, "as the output that it is the gradient of")


def _place_reshard(axis: Axis, node: Node) -> None:
    source = operands(node)[0]
    _place_tangents(axis, (source,))
    placement = axis.of(source)
    axis.at[node] = (placement,)
    wanted = axis.pinned(node) or reduction(axis, node) or placement
    axis.give(node, (placement,), (axis.fitted(node, wanted),))
    axis.log(node, source, axis.pinned_by(node) or "as what it is made of")


def _place_call(axis: Axis, node: Node, wanted: Placement | None) -> None:
    if (item := item_of(node)) is not None:
        source, position = item
        axis.give(node, (axis.at[source][position],), (axis.at[source][position],))
        axis.log(node, source, "a part of it")
        return
    inputs = operands(node)
    _place_tangents(axis, inputs)
    call = Call(node, inputs, tuple(axis.of(value) for value in inputs))
    row, why = choose(axis, call, wanted)
    _remark_attention(axis, call, row)
    axis.give(node, row.operands, row.results)
    kept = (v for v, n in zip(inputs, row.operands, strict=True) if n != R and axis.of(v) == n)
    axis.log(node, next(kept, inputs[0] if inputs else None), why)


def _remark_attention(axis: Axis, call: Call, row: Row) -> None:
    """Say that ranks repeat the work of an attention whose operands they hold parts of."""
    if is_attention(call.node.target) and all(p == R for p in row.operands) and any(p != R for p in call.have):
        axis.remark(call.node, repeated_work(call.node, axis.size, axis.ctx.mesh.hardware))


def _reduce(axis: Axis, node: Node) -> None:
    """Reduce a partial result once if several users would have to."""
    placement = reduction(axis, node)
    if placement is None:
        return
    why = "as its users are sharded" if placement != R else "whole, for several users"
    new = add_reshard(node, f"propagate: partial sum: {why}")
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    add_pin(new, Pin(axis.number, placement, "propagate"))
    if node in axis.weights:
        axis.weights[new] = axis.weights[node]
    axis.placed.adopt(new, node)
    axis.give(new, axis.at[node][:1], (placement,))
    axis.ctx.edges.append(Edge(new.name, axis.name, str(placement), node.name, f"a sum is reduced {why}"))
