"""Choose all layouts at once, for the shortest predicted step that fits in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes._torch import OpOverload
from passes.base import Pass, PassContext
from passes.errors import UserError
from passes.ir.graph import (
    InputRole,
    OutputRole,
    Stage,
    copy_facts,
    input_of,
    is_reshard,
    item_of,
    layout_of,
    layouts_of,
    needs_of,
    operands,
    output_node,
    outputs_of,
    placeholders,
    results_of,
    returned,
    set_layouts,
    set_needs,
)
from passes.ir.layout import Layout, R
from passes.ir.mesh import Mesh
from passes.recipes.context_parallel import repeated_work
from passes.recipes.storage import reshard_for_use
from passes.recipes.weights import weights_of
from passes.rules.attention import is_attention
from passes.rules.rule import space_of
from passes.rules.unknown import why_whole
from passes.search.goal import Goal
from passes.search.prepared import best_solution
from passes.search.solution import Placed, Solution, keys_of


@dataclass(frozen=True)
class Solve(Pass):
    """Give every value a layout and every operand a needed layout, by cost.

    1. `solution` gives the layouts by name; without it, they are searched for.
    2. A call that no rule can shard runs replicated, with a remark. Another says where attention of a sharded sequence is whole.
    3. A parameter that the forward or the backward needs in another layout than it is stored in is gathered after the
       last cast or reshard that the search chose; again in the backward, unless the search keeps it. Other values whose
       reshard the search repeats in the backward, rather than keep its result, get such reshards too.

    Before:

        mesh tp=2
        stage CAPTURED
        %w: f32[4096, 4096] = parameter("w")
        %x: f32[8192, 4096] = input("x")
        %mm: f32[8192, 4096] = mm(%x, %w)
        return output("output") %mm

    After:

        mesh tp=2
        stage PLACED
        %w: f32[4096, 4096] {tp:R} = parameter("w")
        %x: f32[8192, 4096] {tp:S(0)} = input("x")
        %mm: f32[8192, 4096] {tp:S(0)} = mm(%x, %w)
        return output("output") %mm

    Context: mesh=Mesh("tp=2", hardware="h100")
    """

    name: ClassVar[str] = "solve"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.PLACED

    goal: Goal = field(default_factory=Goal)
    solution: Solution | None = None

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        whole = [(node, why_whole(node, unknown_ops=ctx.unknown_ops)) for node in gm.graph.nodes if _has_no_space(node)]
        solution = self.solution or best_solution(gm, _with_hardware(ctx.mesh), self.goal)
        _place(gm, solution)
        for node, why in whole:
            ctx.remark(self, node, f"{why}: runs replicated")
        for node in filter(_is_attention, gm.graph.nodes):
            for axis in _repeating_axes(gm, node):
                cost = repeated_work(node, ctx.mesh.sizes[axis], ctx.mesh.hardware)
                ctx.remark(self, node, f"on {ctx.mesh.names[axis]}: {cost}")
        _gather(gm, solution)
        return True


def _has_no_space(node: Node) -> bool:
    """Return whether no rule says how to shard the call."""
    if not isinstance(node.target, OpOverload) or not results_of(node):
        return False
    return space_of(node) is None


def _is_attention(node: Node) -> bool:
    return is_attention(node.target)


def _repeating_axes(gm: GraphModule, node: Node) -> list[int]:
    """Return the axes that shard inputs or operands of an attention of which every rank takes all."""
    made = [layout_of(value) for value in (*placeholders(gm.graph, InputRole.INPUT), *operands(node))]
    needs = needs_of(node)
    axes = range(len(needs[0].placements))
    return [axis for axis in axes if all(need.on(axis) == R for need in needs) and any(at.on(axis) != R for at in made)]


def _with_hardware(mesh: Mesh) -> Mesh:
    if mesh.hardware is None:
        raise UserError(
            f"the mesh {mesh} does not say on what hardware it is, and a search goes by cost; give "
            f"Mesh('{mesh}', hardware='h100'), or choose a recipe"
        )
    return mesh


def _place(gm: GraphModule, solution: Solution) -> None:
    keys = keys_of(gm)
    for node in gm.graph.nodes:
        if node.op == "output" or not results_of(node):
            continue
        if (item := item_of(node)) is not None:
            layout = layouts_of(item[0])[item[1]]
            placed = Placed((layout,), (layout,))
        else:
            placed = solution.nodes[keys[node]]
        set_layouts(node, *placed.results)
        if is_reshard(node):
            set_needs(node, (layout_of(operands(node)[0]),))
        elif node.op != "placeholder":
            set_needs(node, placed.needs)
    _place_output(gm, solution)


def _place_output(gm: GraphModule, solution: Solution) -> None:
    stored = {input_of(node): layout_of(node) for node in placeholders(gm.graph) if results_of(node)}
    needs = []
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        if not isinstance(value, Node):
            continue
        if output.role is OutputRole.OUTPUT:
            needs.append(solution.outputs[output.name])
        else:
            needs.append(stored[output.partner])
    set_needs(output_node(gm.graph), tuple(needs))


def _gather(gm: GraphModule, solution: Solution) -> None:
    """Add one reshard per needed layout, for parameters and for values that are resharded again in the backward."""
    keys, weights, repeated = keys_of(gm), weights_of(gm.graph), set(solution.repeated)
    for node in [node for node in gm.graph.nodes if node in weights or keys[node] in repeated]:
        for need, users in _by_need(node).items():
            recompute = keys[node] not in solution.kept
            new = reshard_for_use(node, users, f"solve: {'gathered' if node in weights else 'moved'} for use", again=recompute)
            if node.op == "placeholder":
                copy_facts(users[0], new)  # a parameter has no module or line of its own
            set_layouts(new, need)
            set_needs(new, (layout_of(node),))


def _by_need(node: Node) -> dict[Layout, list[Node]]:
    """Return the users of a value by the layout that they need, if it is not the value's own."""
    found: dict[Layout, list[Node]] = {}
    for user in node.users:
        if user.op == "output" or is_reshard(user):
            continue
        needs = (need for operand, need in zip(operands(user), needs_of(user), strict=True) if operand is node)
        if (need := next((need for need in needs if need != layout_of(node)), None)) is not None:
            found.setdefault(need, []).append(user)
    return found
