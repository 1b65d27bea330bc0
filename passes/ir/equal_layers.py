"""The layers of a CAPTURED graph: which nodes belong to which, and which layers are equal.

A layer is the part of the graph that belongs to one module of a list, `layers.7`: parameters, forward and backward
calls, gradients. Nodes are given by their place in the graph, which is faster, as there are many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.ir.folded_layers import index_in
from passes.ir.graph import (
    InputRole,
    Output,
    OutputRole,
    input_of,
    origin_of,
    outputs_of,
    region_of,
    returned,
    value_of,
)

Layer = tuple[str, int]  # FQN of the list, index in it


@dataclass(frozen=True)
class Indexed:
    """A graph with nodes by place, without the output node."""

    nodes: tuple[Node, ...]
    place: Mapping[Node, int]
    inputs: tuple[tuple[int, ...], ...]  # operands in order, per node; one used twice appears twice
    users: tuple[tuple[int, ...], ...]  # calls, in order
    fqns: tuple[str, ...]  # a parameter's or buffer's own, a call's module
    kinds: tuple[int, ...]  # equal for nodes that only differ in operands and FQN
    outputs: tuple[tuple[Output, int | None], ...]  # and the place of each value

    @staticmethod
    def of(graph: Graph, tags: Mapping[str, str]) -> Indexed:
        """Index a graph; `tags` distinguish parameters that otherwise look the same."""
        nodes = tuple(node for node in graph.nodes if node.op != "output")
        place = {node: i for i, node in enumerate(nodes)}
        operands: list[tuple[int, ...]] = []
        users: list[list[int]] = [[] for _ in nodes]
        kinds: dict[Any, int] = {}
        numbers = []
        for i, node in enumerate(nodes):
            found: list[int] = []
            form = None
            if node.op != "placeholder":
                form = (node.target, region_of(node) is None, _form((node.args, node.kwargs), place, found))
            operands.append(tuple(found))
            for j in dict.fromkeys(found):
                users[j].append(i)
            tag = None if form else (input_of(node).role, tags.get(input_of(node).name))
            numbers.append(kinds.setdefault((form, tag, _type(value_of(node))), len(kinds)))
        ends = zip(outputs_of(graph), returned(graph), strict=True)
        return Indexed(
            nodes,
            place,
            tuple(operands),
            tuple(map(tuple, users)),
            tuple(map(_fqn, nodes)),
            tuple(numbers),
            tuple((output, place[value] if isinstance(value, Node) else None) for output, value in ends),
        )


def _form(value: Any, place: Mapping[Node, int], found: list[int]) -> Any:
    """Return arguments with nodes left out, which go to `found`; hashable, and different for `1`, `1.0` and `True`."""
    if isinstance(value, Node):
        found.append(place[value])
        return Node
    if isinstance(value, tuple | list):
        return tuple([_form(item, place, found) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _form(item, place, found)) for name, item in value.items()])
    if isinstance(value, slice):
        return (slice, _form((value.start, value.stop, value.step), place, found))
    return (type(value), str(value)) if isinstance(value, float) else (type(value), value)


def _type(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    if isinstance(value, tuple | list):
        return tuple(map(_type, value))
    return type(value), value


def _fqn(node: Node) -> str:
    if node.op != "placeholder":
        return origin_of(node).fqn
    given = input_of(node)
    return given.name if given.role in (InputRole.PARAMETER, InputRole.BUFFER) else ""


@dataclass(frozen=True)
class Layers:
    """The layers of one level of lists: 0 for `layers.7`, 1 for `stages.2.blocks.7`."""

    graph: Indexed
    layer: tuple[Layer | None, ...]  # of each node
    members: Mapping[Layer, tuple[int, ...]]  # places, in order
    results: Mapping[Layer, tuple[tuple[OutputRole, str, int | None], ...]]  # gradients and buffers: rest of FQN, place
    named: tuple[int, ...]  # per node: its form, and its module inside of the layer

    @staticmethod
    def of(graph: Indexed, level: int) -> Layers:
        """Find the layer of each node.

        A call without a module in the list, such as the sum of two gradients, belongs to the layer of its latest
        operand. A value that depends on no layer and is used by several belongs to none.
        """
        split = {fqn: layer_in(fqn, level) for fqn in dict.fromkeys(graph.fqns)}
        layer: list[Layer | None] = []
        rests: list[str] = []
        for i, fqn in enumerate(graph.fqns):
            own = split[fqn]
            layer.append(own[0] if own is not None else _inherited(graph, layer, i))
            rests.append(own[1] if own is not None else f"^{fqn}")
        _free_invariants(graph, layer)
        members: dict[Layer, list[int]] = defaultdict(list)
        numbers: dict[Any, int] = {}
        seen: dict[Any, int] = defaultdict(int)
        named = []
        for i, one in enumerate(layer):
            if one is None:
                named.append(-1)
                continue
            members[one].append(i)
            what = graph.kinds[i], rests[i]
            seen[one, what] += 1
            named.append(numbers.setdefault((what, seen[one, what]), len(numbers)))
        return Layers(
            graph, tuple(layer), {one: tuple(m) for one, m in members.items()}, _results(graph, level), tuple(named)
        )

    def lists(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return each list and the indices of its layers, in the order of the graph."""
        found: dict[str, list[int]] = defaultdict(list)
        for prefix, index in self.members:
            found[prefix].append(index)
        for prefix, indices in found.items():
            yield prefix, tuple(sorted(indices))

    def between(self, prefix: str, index: int) -> tuple[int, ...]:
        """Return the kinds of the calls that belong to a layer, and to no module of it: those that follow it in a loop."""
        own = self.members.get((prefix, index), ())
        return tuple(self.graph.kinds[i] for i in own if index_in(prefix, self.graph.fqns[i]) is None)

    def signatures(self, prefix: str, indices: tuple[int, ...], reach: int) -> list[int]:
        """Return numbers that are equal for equal layers; values of neighbours up to `reach` layers away count by
        distance."""
        rank = {(prefix, index): number for number, index in enumerate(indices)}
        numbers: dict[Any, int] = {}
        return [
            numbers.setdefault(self._signature((prefix, index), rank, reach), len(numbers)) for index in indices
        ]

    def are_alike_inside(self, prefix: str, indices: tuple[int, ...]) -> bool:
        """Return whether layers are equal but for what reads them, and for which values of one type they read of others."""
        first, *others = (self._inside((prefix, index)) for index in indices)
        return all(one == first for one in others)

    def _inside(self, own: Layer) -> Any:
        graph = self.graph

        def named(other: int) -> Any:
            return self.named[other] if self.layer[other] == own else _type(value_of(graph.nodes[other]))

        calls = [(self.named[i], *map(named, graph.inputs[i])) for i in self.members[own]]
        return calls, [(role, rest, None if i is None else named(i)) for role, rest, i in self.results.get(own, ())]

    def _signature(self, own: Layer, rank: Mapping[Layer, int], reach: int) -> Any:
        graph, here = self.graph, rank[own]

        def relative(other: int) -> tuple[int | None, int]:
            there = rank.get(self.layer[other]) if self.layer[other] is not None else None  # type: ignore[arg-type]
            if there is None or abs(there - here) > reach:
                return None, other
            return there - here, self.named[other]

        calls = [
            (
                self.named[i],
                *[relative(j) for j in graph.inputs[i]],
                *[relative(u) for u in graph.users[i] if self.layer[u] != own],
            )
            for i in self.members[own]
        ]
        ends = [(role, rest, None if i is None else relative(i)) for role, rest, i in self.results.get(own, ())]
        return tuple(calls), tuple(ends)


def depth_of(graph: Indexed) -> int:
    """Return the nesting depth of lists."""
    return max((sum(map(str.isdecimal, fqn.split("."))) for fqn in dict.fromkeys(graph.fqns)), default=0)


@lru_cache(maxsize=1 << 14)
def layer_in(fqn: str, level: int) -> tuple[Layer, str] | None:
    """Return the layer and the rest: `stages.2.blocks.7.w` at level 1 is `("stages.2.blocks", 7), "w"`."""
    parts = fqn.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    if len(numbers) <= level:
        return None
    at = numbers[level]
    return (".".join(parts[:at]), int(parts[at])), ".".join(parts[at + 1 :])


def _inherited(graph: Indexed, layer: list[Layer | None], i: int) -> Layer | None:
    calls = [j for j in graph.inputs[i] if graph.nodes[j].op != "placeholder"]
    latest = layer[max(calls)] if calls else None
    fqn = graph.fqns[i]
    return latest if latest is not None and (not fqn or latest[0].startswith(f"{fqn}.")) else None


def _free_invariants(graph: Indexed, layer: list[Layer | None]) -> None:
    """Remove from all layers the parameters that several use, and values that depend on no layer and are used by
    several."""
    inputs = [i for i, node in enumerate(graph.nodes) if node.op == "placeholder"]
    for i in inputs:
        if any(layer[user] != layer[i] for user in graph.users[i]):
            layer[i] = None
    calls = range(len(inputs), len(layer))
    invariant = [False] * len(layer)
    for i in calls:
        invariant[i] = all(invariant[j] or layer[j] is None for j in graph.inputs[i])
    freed: set[int] = set()
    for i in reversed(calls):
        others = {layer[user] for user in graph.users[i]} - {layer[i], None}
        if invariant[i] and (len(others) > 1 or any(user in freed for user in graph.users[i])):
            layer[i] = None
            freed.add(i)


def _results(graph: Indexed, level: int) -> dict[Layer, tuple[tuple[OutputRole, str, int | None], ...]]:
    found: dict[Layer, list[tuple[OutputRole, str, int | None]]] = defaultdict(list)
    for output, value in graph.outputs:
        is_own = output.role is not OutputRole.OUTPUT and not output.name.startswith("input:")
        own = layer_in(output.name, level) if is_own else None
        if own is not None:
            found[own[0]].append((output.role, own[1], value))
    return {one: tuple(results) for one, results in found.items()}
