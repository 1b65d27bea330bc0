"""Make the variables of a factor graph from a CAPTURED graph: groups of nodes, with the strategies that they take together."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch.fx import Node

from passes.errors import ConstraintError
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
from passes.ir.layout import Layout, R, Shard, is_even, is_storable, next_digit, replicated
from passes.ir.mesh import Mesh
from passes.search.model.axis_groups import AxisGroups
from passes.search.model.factor_graph import Ints, Port
from passes.search.model.grouping import Grouping, joint_strategies
from passes.search.model.skeleton import Member, Owner, Skeleton, VariableSkeleton
from passes.search.model.step_structure import StepStructure
from passes.search.model.strategies import Strategies, Strategy
from passes.search.model.value_edges import segments_of, values_of


def make_skeleton(
    structure: StepStructure, mesh: Mesh, axis_groups: AxisGroups, *, deadline: float = float("inf")
) -> Skeleton:
    """Return the factor graph without costs, with tied layers as one; it depends on the mesh only by its axes.

    Axes of one group are used alike, except where pinned. Raises ConstraintError for pins that no layout meets,
    TimeoutError past `deadline` (by `time.perf_counter`).
    """
    made = _Variables(structure, mesh, axis_groups, deadline)
    made.add_inputs()
    made.add_parameters()
    made.add_replicated()
    made.add_calls()
    values = tuple(values_of(structure, made.owners, made.ends, made.inside))
    leader = structure.ties.leader
    return Skeleton(
        tuple(made.variables), values, segments_of(structure), leader, made.owners, made.ends, axis_groups
    )


class _Variables:
    """Variables as they are added: each takes nodes (leaders of their ties), and perhaps outputs, that are not taken yet."""

    def __init__(self, structure: StepStructure, mesh: Mesh, axis_groups: AxisGroups, deadline: float) -> None:
        self.structure, self.mesh, self.axis_groups, self.deadline = structure, mesh, axis_groups, deadline
        self.graph, self.leader = structure.gm.graph, structure.ties.leader
        self.strategies = Strategies(structure.rows, mesh, axis_groups)
        self.variables: list[VariableSkeleton] = []
        self.owners: dict[Node, Owner] = {}
        self.ends: dict[int, Port] = {}
        self.inside: set[tuple[Node, int]] = set()  # operands that a call has from one of its group

    # --- inputs, parameters, outputs

    def add_inputs(self) -> None:
        """Add inputs of one shape as a variable; outputs (and tangents) that are no numbers follow the first input."""
        groups: dict[object, list[Node]] = {}
        for node in placeholders(self.graph, InputRole.INPUT):
            groups.setdefault((tuple(tensor_of(node).shape), pins_of(node)), []).append(node)
        first = next((group for group in groups.values() if tensor_of(group[0]).dim() > 0), None)
        for group in groups.values():
            self._add_input(group, self._following() if group is first else [])

    def _following(self) -> list[tuple[int, Node]]:
        """Return positions and values of outputs whose layout is not pinned, and that are no numbers."""
        outputs = [(i, value) for i, value, output in self.structure.outputs if output.role is OutputRole.OUTPUT]
        return [(i, value) for i, value in outputs if tensor_of(value).dim() > 0 and not is_reshard(value)]

    def _add_input(self, group: Sequence[Node], following: Sequence[tuple[int, Node]]) -> None:
        names = {f"input:{input_of(node).name}" for node in group}
        outputs = self.structure.outputs
        gradients = [i for i, _, o in outputs if o.role is OutputRole.GRADIENT and o.name in names]
        shape = tuple(tensor_of(group[0]).shape)
        tangents = [(self._tangent(i), value) for i, value in following]
        present = [(tangent, value) for tangent, value in tangents if tangent is not None]
        strategies = []
        for layout in self._layouts(group[0]):
            outs = tuple(_followed(layout, shape, tuple(tensor_of(value).shape), self.mesh) for _, value in following)
            back = tuple(_followed(layout, shape, tuple(tensor_of(value).shape), self.mesh) for _, value in present)
            strategies.append(Strategy((layout,) * len(gradients) + outs, (layout,) * len(group) + back))
        nodes = (*group, *(tangent for tangent, _ in present))
        self._own(self._add(nodes, tuple(strategies)), nodes, [*gradients, *(i for i, _ in following)])

    def _tangent(self, position: int) -> Node | None:
        name = outputs_of(self.graph)[position].name
        tangents = placeholders(self.graph, InputRole.TANGENT)
        return next((node for node in tangents if input_of(node).name == name), None)

    def add_parameters(self) -> None:
        """Add each parameter with its gradient, which comes back as the parameter is stored."""
        gradients = {o.name: (i, value) for i, value, o in self.structure.outputs if o.role is OutputRole.GRADIENT}
        for node in placeholders(self.graph, InputRole.PARAMETER):
            returned_as = gradients.get(input_of(node).name)
            between = _reshards_before(returned_as[1]) if returned_as is not None else ()
            if self.leader[node] is node:
                count = 1 if returned_as is None else 1 + len(between)
                layouts = self._layouts(node)
                strategies = tuple(Strategy((layout,) * count, (layout,) * (1 + len(between))) for layout in layouts)
                self.owners[node] = Owner(self._add((node,), strategies))
            variable = self.owners[self.leader[node]].variable
            if returned_as is not None:
                self.ends[returned_as[0]] = Port(variable, 0)
            for slot, reshard in enumerate(between, start=1):
                self.owners[self.leader[reshard]] = Owner(variable, slot, slot)

    def add_replicated(self) -> None:
        """Add numbers, buffers and rank coordinates, which are whole on every rank, and the remaining outputs."""
        nodes = tuple(node for node in placeholders(self.graph) if self._is_free(node) and not self._is_pinned(node))
        positions = [
            i
            for i, value, output in self.structure.outputs
            if i not in self.ends and not (output.role is OutputRole.OUTPUT and is_reshard(value))
        ]
        if nodes or positions:
            layout = replicated(self.mesh)
            strategy = Strategy((layout,) * len(positions), (layout,) * len(nodes))
            self._own(self._add(nodes, (strategy,)), nodes, positions)

    def _is_pinned(self, node: Node) -> bool:
        """Return whether a node is the tangent of an output whose layout is pinned."""
        return input_of(node).role is InputRole.TANGENT and is_reshard(self._output_for(node))

    def _output_for(self, tangent: Node) -> Node:
        name = input_of(tangent).name
        return next(v for _, v, o in self.structure.outputs if o.role is OutputRole.OUTPUT and o.name == name)

    # --- calls

    def add_calls(self) -> None:
        """Add all other calls, grouped where the graph is large."""
        nodes = self.structure.nodes
        free = [n for n in nodes if n.op == "call_function" and item_of(n) is None and self._is_free(n)]
        groups: list[tuple[Node, ...]] = [(node,) for node in free]
        if self.structure.is_large:
            groups = Grouping(self.graph, self.strategies, self.structure.weights, self._place).of(free)
        for group in groups:
            if is_reshard(group[0]):
                self._add_reshard(group[0])
            else:
                self._add_group(group)

    def _place(self, node: Node) -> object:
        """Return a key of the part of the step that a call is in: calls of one part are made equally often."""
        return self.structure.segment.get(node, 0), self.structure.ties.layer[node], self._count(node)

    def _add_group(self, group: tuple[Node, ...]) -> None:
        own = {node: self.strategies.of(node) for node in group}
        found = joint_strategies(group, own)
        numbers = np.array(found)
        members = [self._member(node, own[node], numbers[:, i]) for i, node in enumerate(group)]
        joint = [[own[node][one] for node, one in zip(group, picked, strict=True)] for picked in found]
        strategies = tuple(Strategy(sum((s.needs for s in one), ()), sum((s.results for s in one), ())) for one in joint)
        variable = self._add(group, strategies, members)
        needs = results = 0
        for node in group:
            self.owners[node] = Owner(variable, results, needs)
            needs, results = needs + len(operands(node)), results + len(results_of(node))
            self.inside |= {(node, i) for i, value in enumerate(operands(node)) if (item_of(value) or (value,))[0] in group}

    def _add_reshard(self, node: Node) -> None:
        """Add an output whose layout is pinned, with its tangents."""
        tangents = [n for n in placeholders(self.graph, InputRole.TANGENT) if self._output_for(n) is node]
        strategies = tuple(Strategy((layout,), (layout,) * (1 + len(tangents))) for layout in self._layouts(node))
        nodes = (node, *tangents)
        self._own(self._add(nodes, strategies), nodes, ())

    # --- layouts

    def _layouts(self, node: Node) -> list[Layout]:
        """Return the layouts of a placeholder, or of a pinned value, that meet its pins."""
        shape = tuple(tensor_of(node).shape)
        found = [strategy.results[0] for strategy in self.strategies.of(node)]
        if node.op == "placeholder" and input_of(node).role is InputRole.PARAMETER:
            found += self._padded(found, shape)
            allowed = is_storable
        else:
            allowed = is_even
        for pin in pins_of(node):
            found = [layout.with_on(pin.axis, pin.placement) for layout in found]
        found = [layout for layout in dict.fromkeys(found) if allowed(layout, shape, self.mesh)]
        if not found:
            pins = ", ".join(f"{self.mesh.names[pin.axis]}:{pin.placement} ({pin.reason})" for pin in pins_of(node))
            raise ConstraintError(f"{node.name} of shape {list(shape)} cannot meet its constraints: {pins}")
        return found

    def _padded(self, layouts: Sequence[Layout], shape: tuple[int, ...]) -> list[Layout]:
        """Return layouts that pad dim 0, on sets of axes that split no dim evenly."""
        even = {_sharded_axes(layout) for layout in layouts}
        found = []
        for layout in layouts:
            for group in self.axis_groups:
                wider = layout
                if shape and all(layout.on(axis) == R and self.mesh.sizes[axis] > 1 for axis in group):
                    for axis in group:
                        wider = wider.with_on(axis, next_digit(wider, 0, self.mesh))
                if _sharded_axes(wider) not in even and is_storable(wider, shape, self.mesh):
                    found.append(wider)
        return found

    # --- all

    def _is_free(self, node: Node) -> bool:
        return self.leader[node] is node and node not in self.owners

    def _add(self, nodes: tuple[Node, ...], strategies: tuple[Strategy, ...], members: Sequence[Member] = ()) -> int:
        """Add a variable and return its number; the costs are those of `members`, or of its first node."""
        if time.perf_counter() > self.deadline:
            raise TimeoutError
        members = members or [self._member(node, strategies) for node in nodes[:1]]
        segment = self.structure.segment.get(nodes[0], 0) if nodes else 0
        self.variables.append(VariableSkeleton(nodes, strategies, segment, tuple(members)))
        return len(self.variables) - 1

    def _own(self, variable: int, nodes: Sequence[Node], positions: Sequence[int]) -> None:
        """Note that results of a variable are these nodes, and its operands these outputs, in order."""
        self.owners |= {node: Owner(variable, slot) for slot, node in enumerate(nodes)}
        self.ends |= {position: Port(variable, slot) for slot, position in enumerate(positions)}

    def _member(self, node: Node, strategies: tuple[Strategy, ...], numbers: Ints | None = None) -> Member:
        return Member(node, strategies, numbers, self._count(node), node in self.structure.saved)

    def _count(self, node: Node) -> int:
        return sum(self.structure.ties.count[alike] for alike in self.structure.alike[node])


def _followed(layout: Layout, shape: tuple[int, ...], other: tuple[int, ...], mesh: Mesh) -> Layout:
    """Return the layout of an output where the first input has `layout`: sharded where dims agree."""
    found = replicated(mesh)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard) and placement.dim < len(other) and shape[placement.dim] == other[placement.dim]:
            found = found.with_on(axis, placement)
    return found if is_even(found, other, mesh) else replicated(mesh)


def _sharded_axes(layout: Layout) -> tuple[bool, ...]:
    return tuple(isinstance(placement, Shard) for placement in layout.placements)


def _reshards_before(value: Node) -> tuple[Node, ...]:
    """Return the reshards between a gradient that is computed and the value that is returned."""
    found = []
    while value.op == "call_function" and len(operands(value)) == 1:
        if is_reshard(value):
            found.append(value)
        value = operands(value)[0]
    return tuple(found)
