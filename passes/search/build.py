"""From a CAPTURED graph to the problem of its layouts, before anything has a price."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch.fx import Node

from passes.cost.fused_regions import source_of
from passes.errors import ConstraintError
from passes.ir.graph import (
    InputRole,
    OutputRole,
    input_of,
    is_reshard,
    is_tensor,
    item_of,
    note_of,
    operands,
    outputs_of,
    pins_of,
    placeholders,
    results_of,
    tensor_of,
)
from passes.ir.layout import Layout, R, Shard, is_even, is_storable, next_digit, replicated
from passes.ir.mesh import Mesh
from passes.search.bundles import Bundles
from passes.search.choices import Choice, Choices
from passes.search.draft import Draft, Owner, Part, Undecided
from passes.search.groups import Groups, joined
from passes.search.outline import Outline
from passes.search.problem import Ints, Segment, Use, Value


def draft(outline: Outline, mesh: Mesh, bundles: Bundles, *, deadline: float = float("inf")) -> Draft:
    """The problem of placing a graph, with tied layers as one; of the mesh, it depends on the axes alone. Axes of one of
    `bundles` are used alike, but for what is pinned.

    Raises ConstraintError for pins that no layout meets, TimeoutError past `deadline` (by `time.perf_counter`).
    """
    return _Builder(outline, mesh, bundles, deadline).draft()


class _Builder:
    """Nodes are grouped into variables, variables get choices, values connect them."""

    def __init__(self, outline: Outline, mesh: Mesh, bundles: Bundles, deadline: float) -> None:
        self.outline, self.mesh, self.bundles, self.deadline = outline, mesh, bundles, deadline
        self.gm, self.ties, self.segment = outline.gm, outline.ties, outline.segment
        self.choices = Choices(outline.rows, mesh, bundles)
        self.variables: list[Undecided] = []
        self.owners: dict[Node, Owner] = {}
        self.ends: dict[int, Use] = {}
        self.inside: set[tuple[Node, int]] = set()  # operands that a call has from one of its group

    def draft(self) -> Draft:
        self._inputs()
        self._parameters()
        self._whole()
        outline = self.outline
        free = [n for n in outline.nodes if n.op == "call_function" and item_of(n) is None and self._is_free(n)]
        groups: list[tuple[Node, ...]] = [(node,) for node in free]
        if outline.is_large:
            groups = Groups(outline.gm.graph, self.choices, outline.weights, self._part).of(free)
        for group in groups:
            self._calls(group)
        described = tuple(self._described())
        values = tuple(self._values())
        return Draft(tuple(self.variables), values, described, self.ties.first, self.owners, self.ends, self.bundles)

    def _is_free(self, node: Node) -> bool:
        return self.ties.first[node] is node and node not in self.owners

    def _part(self, node: Node) -> object:
        """Of the step: calls of one part are done equally often."""
        return self.segment.get(node, 0), self.ties.layer[node], self._count(node)

    def _count(self, node: Node) -> int:
        return sum(self.ties.count[alike] for alike in self.outline.alike[node])

    def _add(self, nodes: tuple[Node, ...], choices: tuple[Choice, ...], parts: Sequence[Part] = ()) -> int:
        if time.perf_counter() > self.deadline:
            raise TimeoutError
        parts = parts or [self._part_of(node, choices) for node in nodes[:1]]
        segment = self.segment.get(nodes[0], 0) if nodes else 0
        self.variables.append(Undecided(nodes, choices, segment, tuple(parts)))
        return len(self.variables) - 1

    def _part_of(self, node: Node, choices: tuple[Choice, ...], numbers: Ints | None = None) -> Part:
        """What a node and those tied to it take of a variable."""
        return Part(node, choices, numbers, self._count(node), node in self.outline.saved)

    # --- the border

    def _inputs(self) -> None:
        """Inputs of one shape are split alike; outputs (and tangents) that are no number are split as the first input."""
        groups: dict[object, list[Node]] = {}
        for node in placeholders(self.gm.graph, InputRole.INPUT):
            groups.setdefault((tuple(tensor_of(node).shape), pins_of(node)), []).append(node)
        leader = next((group for group in groups.values() if tensor_of(group[0]).dim() > 0), None)
        for group in groups.values():
            following = self._following() if group is leader else []
            self._border(tuple(group), self._layouts(group[0]), following)

    def _following(self) -> list[tuple[int, Node]]:
        """Positions and values of outputs whose layout is not pinned, and that are no number."""
        outputs = [(i, value) for i, value, output in self.outline.outputs if output.role is OutputRole.OUTPUT]
        return [(i, value) for i, value in outputs if tensor_of(value).dim() > 0 and not is_reshard(value)]

    def _border(self, group: tuple[Node, ...], layouts: list[Layout], following: list[tuple[int, Node]]) -> None:
        names = {f"input:{input_of(node).name}" for node in group}
        gradients = [i for i, _, o in self.outline.outputs if o.role is OutputRole.GRADIENT and o.name in names]
        shape = tuple(tensor_of(group[0]).shape)
        tangents = [(self._tangent(i), value) for i, value in following]
        present = [(tangent, value) for tangent, value in tangents if tangent is not None]
        choices = []
        for layout in layouts:
            outs = tuple(_followed(layout, shape, tuple(tensor_of(value).shape), self.mesh) for _, value in following)
            back = tuple(_followed(layout, shape, tuple(tensor_of(value).shape), self.mesh) for _, value in present)
            choices.append(Choice((layout,) * len(gradients) + outs, (layout,) * len(group) + back))
        nodes = (*group, *(tangent for tangent, _ in present))
        variable = self._add(nodes, tuple(choices))
        for slot, node in enumerate(nodes):
            self.owners[node] = Owner(variable, slot)
        for slot, position in enumerate([*gradients, *(i for i, _ in following)]):
            self.ends[position] = Use(variable, slot)

    def _tangent(self, position: int) -> Node | None:
        name = outputs_of(self.gm.graph)[position].name
        tangents = placeholders(self.gm.graph, InputRole.TANGENT)
        return next((node for node in tangents if input_of(node).name == name), None)

    def _parameters(self) -> None:
        """A gradient comes back as its parameter is stored; what mixed precision reduces on the way is as well."""
        gradients = {o.name: (i, value) for i, value, o in self.outline.outputs if o.role is OutputRole.GRADIENT}
        for node in placeholders(self.gm.graph, InputRole.PARAMETER):
            returned_as = gradients.get(input_of(node).name)
            between = _reshards_before(returned_as[1]) if returned_as is not None else ()
            if self.ties.first[node] is node:
                count = 1 if returned_as is None else 1 + len(between)
                layouts = self._layouts(node)
                choices = tuple(Choice((layout,) * count, (layout,) * (1 + len(between))) for layout in layouts)
                self.owners[node] = Owner(self._add((node,), choices))
            variable = self.owners[self.ties.first[node]].variable
            if returned_as is not None:
                self.ends[returned_as[0]] = Use(variable, 0)
            for slot, between_node in enumerate(between, start=1):
                self.owners[self.ties.first[between_node]] = Owner(variable, slot, slot)

    def _whole(self) -> None:
        """Numbers, buffers and what tells ranks apart are whole on every rank."""
        nodes = tuple(n for n in placeholders(self.gm.graph) if n not in self.owners and self.ties.first[n] is n)
        nodes = tuple(node for node in nodes if not self._is_pinned_tangent(node))
        positions = [
            i
            for i, value, output in self.outline.outputs
            if i not in self.ends and not (output.role is OutputRole.OUTPUT and is_reshard(value))
        ]
        layout = replicated(self.mesh)
        if not nodes and not positions:
            return
        choice = Choice((layout,) * len(positions), (layout,) * len(nodes))
        variable = self._add(nodes, (choice,))
        for slot, node in enumerate(nodes):
            self.owners[node] = Owner(variable, slot)
        for slot, position in enumerate(positions):
            self.ends[position] = Use(variable, slot)

    def _is_pinned_tangent(self, node: Node) -> bool:
        return input_of(node).role is InputRole.TANGENT and is_reshard(self._output_for(node))

    def _output_for(self, tangent: Node) -> Node:
        name = input_of(tangent).name
        return next(v for _, v, o in self.outline.outputs if o.role is OutputRole.OUTPUT and o.name == name)

    def _layouts(self, node: Node) -> list[Layout]:
        """Layouts of a placeholder, or of a pinned value, that meet its pins."""
        shape = tuple(tensor_of(node).shape)
        found = [choice.results[0] for choice in self.choices.of(node)]
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
            raise ConstraintError(f"{node.name} of shape {list(shape)} cannot be laid out as insisted: {pins}")
        return found

    def _padded(self, layouts: list[Layout], shape: tuple[int, ...]) -> list[Layout]:
        """Layouts that pad dim 0, on sets of axes that split no dim evenly."""
        even = {_axes(layout) for layout in layouts}
        found = []
        for layout in layouts:
            for bundle in self.bundles:
                wider = layout
                if shape and all(layout.on(axis) == R and self.mesh.sizes[axis] > 1 for axis in bundle):
                    for axis in bundle:
                        wider = wider.with_on(axis, next_digit(wider, 0, self.mesh))
                if _axes(wider) not in even and is_storable(wider, shape, self.mesh):
                    found.append(wider)
        return found

    # --- calls

    def _calls(self, group: tuple[Node, ...]) -> None:
        if is_reshard(group[0]):
            self._reshard(group[0])
            return
        choices = {node: self.choices.of(node) for node in group}
        found = joined(group, choices)
        numbers = np.array(found)
        parts = [self._part_of(node, choices[node], numbers[:, i]) for i, node in enumerate(group)]
        both = [[choices[node][one] for node, one in zip(group, picked, strict=True)] for picked in found]
        together = tuple(Choice(sum((c.needs for c in one), ()), sum((c.results for c in one), ())) for one in both)
        variable = self._add(group, together, parts)
        needs = results = 0
        for node in group:
            self.owners[node] = Owner(variable, results, needs)
            needs, results = needs + len(operands(node)), results + len(results_of(node))
            self.inside |= {(node, i) for i, value in enumerate(operands(node)) if (item_of(value) or (value,))[0] in group}

    def _reshard(self, node: Node) -> None:
        tangents = [n for n in placeholders(self.gm.graph, InputRole.TANGENT) if self._output_for(n) is node]
        layouts = self._layouts(node)
        choices = tuple(Choice((layout,), (layout,) * (1 + len(tangents))) for layout in layouts)
        variable = self._add((node, *tangents), choices)
        for slot, one in enumerate((node, *tangents)):
            self.owners[one] = Owner(variable, slot)

    # --- values

    def _values(self) -> Iterator[Value]:
        ends: dict[Node, list[Use]] = {}
        for position, value, _ in self.outline.outputs:
            if position in self.ends:
                ends.setdefault(value, []).append(self.ends[position])
        grouped: dict[object, list[tuple[Node, Node]]] = {}
        for node in self.outline.nodes:
            if not is_tensor(node) or not (uses := self._uses(node, ends)):
                continue
            source, position = item_of(node) or (node, 0)
            owner = self.owners[self.ties.first[source]]
            maker = Use(owner.variable, owner.results + position)
            for is_forward, some in uses.items():
                grouped.setdefault((maker, tuple(some), is_forward), []).append((node, self._place(node, is_forward)))
        again: dict[object, int] = {}
        for number, ((maker, some, is_forward), members) in enumerate(grouped.items()):  # type: ignore[misc]
            node, place = members[0]
            tensor = tensor_of(node)
            hides = node in self.outline.weights or node in self.outline.gradients
            if hides and is_forward:
                again[maker, members[0][0]] = number
            yield Value(
                node.name,
                node,
                maker,
                tuple(some),
                tuple(tensor.shape),
                tensor.element_size(),
                sum(self.ties.count[member] for member, _ in members),
                self.segment.get(self.ties.first[place], 0),
                hides=hides,
                is_parameter=node in self.outline.weights,
                saved=node not in self.outline.weights and node in self.outline.read,
                is_counted=self.ties.first[source_of(node)] in self.outline.saved,
                backward=self._again(node),
                is_term=node in self.outline.gradients and any(_is_widening(user) for user in node.users),
                again=again.get((maker, members[0][0]), -1) if not is_forward else -1,
            )

    def _uses(self, node: Node, ends: Mapping[Node, list[Use]]) -> dict[bool, list[Use]]:
        """Uses of a value in the forward and in the backward; of one that is no parameter, together."""
        found: dict[bool, dict[Use, None]] = {}
        for user in node.users:
            if user.op == "output" or item_of(user) is not None:
                continue
            owner = self.owners[self.ties.first[user]]
            is_forward = user in self.outline.forward or node not in self.outline.weights
            for i, operand in enumerate(operands(user)):
                if operand is node and (self.ties.first[user], i) not in self.inside:
                    found.setdefault(is_forward, {})[Use(owner.variable, owner.needs + i)] = None
        for use in ends.get(node, ()):
            found.setdefault(node in self.outline.forward or node not in self.outline.weights, {})[use] = None
        return {key: sorted(uses, key=lambda use: (use.variable, use.slot)) for key, uses in sorted(found.items(), reverse=True)}

    def _place(self, node: Node, is_forward: bool) -> Node:
        """The call that a value's move stands next to: its maker, or its first user for a parameter."""
        if node not in self.outline.weights:
            return node
        users = [user for user in node.users if user.op != "output" and (user in self.outline.forward) == is_forward]
        while users and users[0] in self.outline.weights and users[0].users:
            users = [user for user in users[0].users if user.op != "output"]
        return users[0] if users else node

    def _again(self, node: Node) -> int:
        """The segment of the first call of the backward that uses a value of the forward; -1 where there is none."""
        if node in self.outline.weights or node not in self.outline.forward:
            return -1
        users = (user for user in node.users if user.op != "output" and user not in self.outline.forward)
        return min((self.segment[user] for user in users if user in self.segment), default=-1)

    # --- segments

    def _described(self) -> Iterator[Segment]:
        """A layer's gathers hide behind the layer before, its reductions behind the layer after it."""
        for number, (name, is_forward) in enumerate(self.outline.names):
            nodes = [node for node, segment in self.segment.items() if segment == number]
            counts: dict[Node, int] = {}
            for node in nodes:
                first = self.ties.first[node]
                counts[first] = counts.get(first, 0) + self.ties.count[node]
            layers = max(counts.values(), default=1)
            edge = "start" if is_forward else "end"
            alone = name == edge or (name, is_forward) == self.outline.names[0]
            yield Segment(f"{name} {'forward' if is_forward else 'backward'}", layers, 1.0 if alone else 1.0 / layers)


def _followed(layout: Layout, shape: tuple[int, ...], other: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout of an output where the first input has `layout`: split where dims agree."""
    found = replicated(mesh)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard) and placement.dim < len(other) and shape[placement.dim] == other[placement.dim]:
            found = found.with_on(axis, placement)
    return found if is_even(found, other, mesh) else replicated(mesh)


def _axes(layout: Layout) -> tuple[bool, ...]:
    return tuple(isinstance(placement, Shard) for placement in layout.placements)


def _is_widening(user: Node) -> bool:
    """Whether mixed precision casts to the dtype that gradients are reduced in."""
    if user.op != "call_function" or not note_of(user) or is_reshard(user):
        return False
    return tensor_of(user).element_size() > tensor_of(operands(user)[0]).element_size()


def _reshards_before(value: Node) -> tuple[Node, ...]:
    """Reshards between a gradient that is computed and the value that is returned."""
    found = []
    while value.op == "call_function" and len(operands(value)) == 1:
        if is_reshard(value):
            found.append(value)
        value = operands(value)[0]
    return tuple(found)
