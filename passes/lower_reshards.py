"""Turn every reshard into the cheapest sequence of collectives and local steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.cost.fused_regions import source_of
from passes.ir.collectives import TAKE_PART
from passes.ir.graph import (
    InputRole,
    OutputRole,
    Stage,
    copy_facts,
    input_of,
    is_recompute,
    is_reshard,
    layout_of,
    note_of,
    operands,
    outputs_of,
    placeholders,
    set_layouts,
    set_needs,
    set_note,
    set_recompute,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh
from passes.ir.routes import plan_steps
from passes.recipes.weights import weights_of


@dataclass(frozen=True)
class LowerReshards(Pass):
    """Replace each reshard by steps, each a local one or a collective over one or more axes.

    The sequence is the one that receives the fewest bytes, and among those has the fewest collectives. All layouts
    between source and target are tried (every axis at its source, its target or `R`). Consecutive gathers over several
    axes are joined in one collective, and so are reductions and scatters.

    A rank's part of a buffer is marked to be taken again in the backward: the buffer is there anyway, if nothing writes to it.

    The steps stand before the first user if they grow the value, after its producer if they shrink it. Views and casts
    of a parameter stand before their first users too, so that nothing is gathered long before its use.

    Before:

        mesh dp=2,tp=2
        stage EXPLICIT
        %w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
        %x: f32[4, 8, 6] {dp:S(0), tp:R} = input("x")
        %sum_1: f32[8, 6] {dp:P(sum), tp:R} = sum.dim_IntList(%x, [0])
        %reshard: f32[8, 6] {dp:R, tp:R} = reshard(%w)
        %reshard_1: f32[8, 6] {dp:S(0), tp:S(1)} = reshard(%sum_1)
        return output("0") %reshard, output("1") %reshard_1

    After:

        mesh dp=2,tp=2
        stage COLLECTIVE
        %w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
        %x: f32[4, 8, 6] {dp:S(0), tp:R} = input("x")
        %sum_1: f32[8, 6] {dp:P(sum), tp:R} = sum.dim_IntList(%x, [0])
        %take_part: f32[8, 6] {dp:P(sum), tp:S(1)} = take_part(%sum_1, ["tp"])
        %reduce_scatter: f32[8, 6] {dp:S(0), tp:S(1)} = reduce_scatter(%take_part, ["dp"])
        %all_gather: f32[8, 6] {dp:R, tp:R} = all_gather(%w, ["dp", "tp"])
        return output("0") %all_gather, output("1") %reduce_scatter
    """

    name: ClassVar[str] = "lower_reshards"
    takes: ClassVar[Stage] = Stage.EXPLICIT
    gives: ClassVar[Stage] = Stage.COLLECTIVE

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        _sink(gm)
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        nodes = [node for node in gm.graph.nodes if is_reshard(node)]
        held = _constant_buffers(gm)
        for node in nodes:
            _lower(node, ctx.mesh, order, held)
        return bool(nodes)


def _sink(gm: GraphModule) -> None:
    for node in reversed(list(weights_of(gm.graph))):
        if node.op == "call_function" and node.users:
            min(node.users).prepend(node)


def _constant_buffers(gm: GraphModule) -> set[Node]:
    """Return the buffers to which the program writes nothing, and their views."""
    written = {output.name for output in outputs_of(gm.graph) if output.role is OutputRole.BUFFER}
    found = {node for node in placeholders(gm.graph, InputRole.BUFFER) if input_of(node).name not in written}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_reshard(node) and source_of(node) in found:
            found.add(node)
    return found


def _lower(node: Node, mesh: Mesh, order: dict[Node, int], held: set[Node]) -> None:
    value = operands(node)[0]
    shape = tuple(tensor_of(node).shape)
    steps = plan_steps(layout_of(value), layout_of(node), shape, mesh)
    grows = math.prod(local_shape(layout_of(node), shape, mesh)) > math.prod(local_shape(layout_of(value), shape, mesh))
    first_user = min(node.users, key=lambda user: order.get(user, -1), default=None)
    current = value
    for step in steps:
        before = first_user if grows and first_user is not None else node
        with node.graph.inserting_before(before):
            new = node.graph.call_function(step.kind.step, (current, [mesh.names[a] for a in step.axes]))
        order[new] = order.get(before, 0)
        copy_facts(node, new)
        set_value(new, value_of(node))
        set_layouts(new, step.layout)
        set_needs(new, (layout_of(current),))
        set_note(new, note_of(node))
        set_recompute(new, is_recompute(node) or (step.kind is TAKE_PART and current in held))
        current = new
    node.replace_all_uses_with(current)
    node.graph.erase_node(node)
