"""Make the variables of a factor graph from a CAPTURED graph: groups of nodes, with the strategies that they take together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch.fx import Node

from passes.ir.graph import (
    InputRole,
    OutputRole,
    input_of,
    is_reshard,
    item_of,
    operands,
    outputs_of,
    pins_of,
    placeholders,
    results_of,
    tensor_of,
)
from passes.ir.layout import Layout, R, Shard, is_even, replicated
from passes.ir.mesh import Mesh
from passes.search.model.axis_groups import AxisGroups
from passes.search.model.factor_graph import Ints, Port
from passes.search.model.grouping import Grouping, joint_strategies
from passes.search.model.pinned_layouts import pinned_layouts
from passes.search.model.skeleton import Member, Owner, Skeleton, VariableSkeleton
from passes.search.model.step_structure import StepStructure
from passes.search.model.strategies import Strategies, Strategy
from passes.search.model.value_edges import segments_of, values_of
from passes.search.output_dims import Places, followed, output_dims


def make_skeleton(
    structure: StepStructure, mesh: Mesh, axis_groups: AxisGroups, *, deadline: float = float("inf")
) -> Skeleton:
    """Return the factor graph without costs, with tied layers as one; it depends on the mesh only by its axes.

    Axes of one group are used alike, except where pinned. Raises ConstraintError for pins that no layout meets,
    TimeoutError past `deadline` (by `time.perf_counter`).
    """
    step = _Step(structure, mesh, axis_groups, Strategies(structure.rows, mesh, axis_groups))
    drafts = _in_time(_inputs(step), deadline)
    drafts += _in_time(_parameters(step), deadline)
    drafts += _in_time(_replicated(step, drafts), deadline)
    drafts += _in_time(_calls(step, drafts), deadline)
    owners = {node: Owner(i, *slots) for i, draft in enumerate(drafts) for node, slots in draft.slots.items()}
    ends = {position: Port(i, slot) for i, draft in enumerate(drafts) for position, slot in draft.ends.items()}
    values = tuple(values_of(structure, owners, ends, frozenset().union(*(draft.inside for draft in drafts))))
    variables = tuple(draft.variable for draft in drafts)
    return Skeleton(variables, values, segments_of(structure), structure.ties.leader, owners, ends, axis_groups)


@dataclass(frozen=True, eq=False)
class _Step:
    """The step and the strategies from which the variables are made."""

    structure: StepStructure
    mesh: Mesh
    axis_groups: AxisGroups
    strategies: Strategies

    def layouts(self, node: Node) -> list[Layout]:
        """Return the layouts of a placeholder, or of a pinned value, that meet its pins."""
        free = [strategy.results[0] for strategy in self.strategies.of(node)]
        return pinned_layouts(node, free, self.mesh, self.axis_groups)

    def placeholders(self, *roles: InputRole) -> tuple[Node, ...]:
        return placeholders(self.structure.gm.graph, *roles)


@dataclass(frozen=True, eq=False)
class _Draft:
    """A variable that has no number yet, and the nodes (leaders of their ties) and outputs that it decides about."""

    variable: VariableSkeleton
    slots: Mapping[Node, tuple[int, int]]  # of a node's first result and operand in the strategies
    ends: Mapping[int, int] = field(default_factory=dict)  # position in the graph's output -> slot of the operand
    inside: frozenset[tuple[Node, int]] = frozenset()  # operands that a call has from one of its group


def _in_time(drafts: Iterable[_Draft], deadline: float) -> list[_Draft]:
    made = []
    for draft in drafts:
        if time.perf_counter() > deadline:
            raise TimeoutError
        made.append(draft)
    return made


# --- inputs, parameters, outputs


def _inputs(step: _Step) -> Iterator[_Draft]:
    """Yield a variable for inputs of one shape; outputs (and tangents) that are no numbers follow the first input."""
    places = output_dims(step.structure.gm)
    groups: dict[object, list[Node]] = {}
    for node in step.placeholders(InputRole.INPUT):
        groups.setdefault((tuple(tensor_of(node).shape), pins_of(node)), []).append(node)
    first = next((group for group in groups.values() if tensor_of(group[0]).dim() > 0), None)
    for group in groups.values():
        yield _input(step, group, _following(step.structure, places) if group is first else [])


@dataclass(frozen=True)
class _Following:
    """An output that follows the first input: its position, its shape, and where it has the dims of that input."""

    position: int
    shape: tuple[int, ...]
    places: Places


def _following(structure: StepStructure, places: Mapping[str, Places]) -> list[_Following]:
    """Return the outputs whose layout is not pinned, and that are no numbers."""
    return [
        _Following(i, tuple(tensor_of(value).shape), places.get(output.name, {}))
        for i, value, output in structure.outputs
        if output.role is OutputRole.OUTPUT and tensor_of(value).dim() > 0 and not is_reshard(value)
    ]


def _input(step: _Step, group: Sequence[Node], following: Sequence[_Following]) -> _Draft:
    names = {f"input:{input_of(node).name}" for node in group}
    outputs = step.structure.outputs
    gradients = [i for i, _, o in outputs if o.role is OutputRole.GRADIENT and o.name in names]
    shape = tuple(tensor_of(group[0]).shape)
    tangents = [(_tangent(step, one.position), one) for one in following]
    present = [(tangent, one) for tangent, one in tangents if tangent is not None]
    strategies = []
    for layout in step.layouts(group[0]):
        outs = tuple(_followed(layout, shape, one, step.mesh) for one in following)
        back = tuple(_followed(layout, shape, one, step.mesh) for _, one in present)
        strategies.append(Strategy((layout,) * len(gradients) + outs, (layout,) * len(group) + back))
    nodes = (*group, *(tangent for tangent, _ in present))
    return _draft(step, nodes, tuple(strategies), [*gradients, *(one.position for one in following)])


def _tangent(step: _Step, position: int) -> Node | None:
    name = outputs_of(step.structure.gm.graph)[position].name
    return next((node for node in step.placeholders(InputRole.TANGENT) if input_of(node).name == name), None)


def _followed(layout: Layout, shape: tuple[int, ...], output: _Following, mesh: Mesh) -> Layout:
    """Return the layout of an output where the first input has `layout`: sharded where it has the input's dims, or dims agree."""
    found = replicated(mesh)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            found = found.with_on(axis, followed(placement, shape, output.shape, output.places) or R)
    return found if is_even(found, output.shape, mesh) else replicated(mesh)


def _parameters(step: _Step) -> Iterator[_Draft]:
    """Yield each parameter (tied ones as one) with its gradient, which comes back as the parameter is stored."""
    tied: dict[Node, list[Node]] = {}
    for node in step.placeholders(InputRole.PARAMETER):
        tied.setdefault(step.structure.ties.leader[node], []).append(node)
    gradients = {o.name: (i, value) for i, value, o in step.structure.outputs if o.role is OutputRole.GRADIENT}
    for nodes in tied.values():
        yield _parameter(step, nodes, [gradients.get(input_of(node).name) for node in nodes])


def _parameter(step: _Step, nodes: Sequence[Node], gradients: Sequence[tuple[int, Node] | None]) -> _Draft:
    """Return the variable of a parameter and those tied to it; `gradients` are positions and values."""
    leader = step.structure.ties.leader
    between = [() if one is None else _reshards_before(one[1]) for one in gradients]
    needed = (gradients[0] is not None) + len(between[0])
    layouts = step.layouts(nodes[0])
    strategies = tuple(Strategy((layout,) * needed, (layout,) * (1 + len(between[0]))) for layout in layouts)
    reshards = {leader[node]: (slot, slot) for one in between for slot, node in enumerate(one, start=1)}
    ends = {one[0]: 0 for one in gradients if one is not None}
    return _Draft(_variable(step, nodes[:1], strategies), {nodes[0]: (0, 0)} | reshards, ends)


def _reshards_before(value: Node) -> tuple[Node, ...]:
    """Return the reshards between a gradient that is computed and the value that is returned."""
    found = []
    while value.op == "call_function" and len(operands(value)) == 1:
        if is_reshard(value):
            found.append(value)
        value = operands(value)[0]
    return tuple(found)


def _replicated(step: _Step, drafts: Sequence[_Draft]) -> Iterator[_Draft]:
    """Yield one variable: numbers, buffers and what tells ranks apart, whole on every rank, and outputs that are left."""
    nodes = [node for node in _free(step, step.placeholders(), drafts) if not _is_pinned(step, node)]
    ended = set().union(*(draft.ends for draft in drafts))
    positions = [
        i
        for i, value, output in step.structure.outputs
        if i not in ended and not (output.role is OutputRole.OUTPUT and is_reshard(value))
    ]
    if nodes or positions:
        layout = replicated(step.mesh)
        yield _draft(step, nodes, (Strategy((layout,) * len(positions), (layout,) * len(nodes)),), positions)


def _is_pinned(step: _Step, node: Node) -> bool:
    """Tell whether a node is the tangent of an output whose layout is pinned."""
    return input_of(node).role is InputRole.TANGENT and is_reshard(_output_for(step, node))


def _output_for(step: _Step, tangent: Node) -> Node:
    name = input_of(tangent).name
    return next(v for _, v, o in step.structure.outputs if o.role is OutputRole.OUTPUT and o.name == name)


# --- calls


def _calls(step: _Step, drafts: Sequence[_Draft]) -> Iterator[_Draft]:
    """Yield all other calls, grouped where the graph is large."""
    structure = step.structure
    free = _free(step, [n for n in structure.nodes if n.op == "call_function" and item_of(n) is None], drafts)
    groups: list[tuple[Node, ...]] = [(node,) for node in free]
    if structure.is_large:
        place = partial(_place, step)
        groups = Grouping(structure.gm.graph, step.strategies, structure.weights, place).of(free)
    for group in groups:
        if is_reshard(group[0]):
            yield _reshard(step, group[0])
        else:
            own = {node: step.strategies.of(node) for node in group}
            for part, found in joint_strategies(group, own):
                yield _group(step, part, own, found)


def _place(step: _Step, node: Node) -> object:
    """Return a key of the part of the step that a call is in: calls of one part are made equally often."""
    return step.structure.segment.get(node, 0), step.structure.ties.layer[node], _count(step, node)


def _group(
    step: _Step, group: tuple[Node, ...], own: Mapping[Node, tuple[Strategy, ...]], found: Sequence[tuple[int, ...]]
) -> _Draft:
    numbers = np.array(found)
    members = [_member(step, node, own[node], numbers[:, i]) for i, node in enumerate(group)]
    joint = [[own[node][one] for node, one in zip(group, picked, strict=True)] for picked in found]
    strategies = tuple(Strategy(sum((s.needs for s in one), ()), sum((s.results for s in one), ())) for one in joint)
    slots: dict[Node, tuple[int, int]] = {}
    needs = results = 0
    for node in group:
        slots[node] = results, needs
        needs, results = needs + len(operands(node)), results + len(results_of(node))
    used = [(node, i, value) for node in group for i, value in enumerate(operands(node))]
    inside = frozenset((node, i) for node, i, value in used if (item_of(value) or (value,))[0] in group)
    return _Draft(_variable(step, group, strategies, members), slots, inside=inside)


def _reshard(step: _Step, node: Node) -> _Draft:
    """Return the variable of an output whose layout is pinned, with its tangents."""
    tangents = [n for n in step.placeholders(InputRole.TANGENT) if _output_for(step, n) is node]
    strategies = tuple(Strategy((layout,), (layout,) * (1 + len(tangents))) for layout in step.layouts(node))
    return _draft(step, (node, *tangents), strategies)


# --- all


def _free(step: _Step, nodes: Iterable[Node], drafts: Iterable[_Draft]) -> list[Node]:
    """Return the leaders that no variable decides about."""
    taken: set[Node] = set().union(*(draft.slots for draft in drafts))
    return [node for node in nodes if step.structure.ties.leader[node] is node and node not in taken]


def _draft(
    step: _Step, nodes: Sequence[Node], strategies: tuple[Strategy, ...], positions: Sequence[int] = ()
) -> _Draft:
    """Return a variable with these nodes as results and these outputs as operands, in order."""
    slots = {node: (slot, 0) for slot, node in enumerate(nodes)}
    return _Draft(
        _variable(step, nodes, strategies), slots, {position: slot for slot, position in enumerate(positions)}
    )


def _variable(
    step: _Step, nodes: Sequence[Node], strategies: tuple[Strategy, ...], members: Sequence[Member] = ()
) -> VariableSkeleton:
    """Return a variable; the costs are those of `members`, or of its first node."""
    members = members or [_member(step, node, strategies) for node in nodes[:1]]
    segment = step.structure.segment.get(nodes[0], 0) if nodes else 0
    return VariableSkeleton(tuple(nodes), strategies, segment, tuple(members))


def _member(step: _Step, node: Node, strategies: tuple[Strategy, ...], numbers: Ints | None = None) -> Member:
    is_saved, is_awaited = node in step.structure.saved, node not in step.structure.gradients
    return Member(node, strategies, numbers, _count(step, node), is_saved, is_awaited, _outer(step, node))


def _outer(step: _Step, node: Node) -> float:
    structure = step.structure
    segment, nodes = structure.segment.get(node, 0), structure.alike[node]
    is_forward = structure.names[segment][1]
    return structure.share_of_last(nodes, segment) if is_forward else structure.share_of_first(nodes, segment)


def _count(step: _Step, node: Node) -> int:
    return sum(step.structure.ties.count[alike] for alike in step.structure.alike[node])
