"""The parts of a graph's structure that are the same on every mesh: tied layers, segments, values saved for the
backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from torch.fx import GraphModule, Node

from passes.cost.fused_regions import (
    is_alias,
    is_fusible,
    is_generated,
    is_inlined_place,
    is_reduction,
    joins_products,
    node_nbytes,
    regions,
    source_of,
)
from passes.ir.graph import OutputRole, is_reshard, operands, outputs_of, results_of, returned
from passes.recipes.weights import weights_of
from passes.search.model.grouping import SMALL
from passes.search.model.strategies import RowTables
from passes.search.model.tied_layers import tied_layers


class StepStructure:
    """The structure of a CAPTURED graph: its nodes, ties, segments, and what is saved for the backward."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes = tuple(n for n in gm.graph.nodes if n.op != "output" and results_of(n))
        self.ties = tied_layers(gm)
        self.alike: dict[Node, list[Node]] = {}
        for node in self.nodes:
            self.alike.setdefault(self.ties.leader[node], []).append(node)
        calls = {self.ties.leader[node] for node in self.nodes if node.op == "call_function"}
        self.is_large = len(calls) > SMALL
        self.rows = RowTables(gm.graph, is_large=self.is_large)
        self.weights = weights_of(gm.graph)
        self.forward = _forward(gm)
        self.gradients = _to_gradients(gm)
        saved, self.read, self.remade = _saved(self.nodes, self.forward)
        self.inlined = {node for node in self.nodes if node.op == "call_function" and is_inlined_place(node)}
        self.fused = _beside_each_other([one for one in regions(gm.graph, self.forward) if is_generated(one[0])], self.forward)
        self.saved = {self.ties.leader[node] for node in saved}
        self.names: list[tuple[str, bool]] = []  # of segments; whether of the forward
        self.segment = self._segments()
        self.outputs = [
            (i, value, output)
            for i, (value, output) in enumerate(zip(returned(gm.graph), outputs_of(gm.graph), strict=True))
            if isinstance(value, Node)
        ]
        self.early = frozenset(
            output.name
            for _, value, output in self.outputs
            if output.role is OutputRole.GRADIENT and self.names[self.segment.get(value, 0)] == ("start", False)
        )

    def share_of_first(self, nodes: Collection[Node], segment: int) -> float:
        """Return the part of what `nodes` stand for that is of the layer with which a segment begins."""
        return self._share(nodes, self.edges.get(segment, ("", ""))[0])

    def share_of_last(self, nodes: Collection[Node], segment: int) -> float:
        """Return the part of what `nodes` stand for that is of the layer with which a segment ends."""
        return self._share(nodes, self.edges.get(segment, ("", ""))[1])

    def _share(self, nodes: Collection[Node], layer: str) -> float:
        return sum(self.ties.layer[node] == layer for node in nodes) / max(1, sum(self.ties.count[node] for node in nodes))

    @cached_property
    def edges(self) -> dict[int, tuple[str, str]]:
        """Return the layers that each segment begins and ends with. A layer without weights, such as a ReLU, sends nothing and
        does not count, unless no layer has weights."""
        layer, found = self.ties.layer, dict[int, list[str]]()
        for node, segment in self.segment.items():
            found.setdefault(segment, []).append(layer[node])
        with_weights = {layer[node] for node in self.nodes if node.op == "placeholder"}
        counted = {segment: [one for one in layers if one in with_weights] or layers for segment, layers in found.items()}
        return {segment: (layers[0], layers[-1]) for segment, layers in counted.items()}

    def _segments(self) -> dict[Node, int]:
        """Number the segment of each call: the layers of a list are one, alike or not, as a message hides beside its
        neighbours; calls outside of all layers come before the first layer or after the last."""
        found: dict[Node, int] = {}
        seen: dict[bool, str] = {True: "start", False: "start"}
        last = max(node for node in self.nodes if node in self.forward)
        for node in self.nodes:
            if node.op != "call_function":
                continue
            is_forward = node in self.forward
            layer = self.ties.layer[self.ties.leader[node]]
            if layer and node not in self.weights and (is_forward or node > last):  # not what a forward computes for the backward
                seen[is_forward] = "end"
            name = f"{layer.rpartition('.')[0]}.*" if layer else seen[is_forward], is_forward
            if name not in self.names:
                self.names.append(name)
            found[node] = self.names.index(name)
        if not self.names:
            self.names.append(("start", True))
        return found


def _beside_each_other(fused: Sequence[tuple[Node, ...]], forward: Collection[Node]) -> list[tuple[Node, ...]]:
    """Join neighbours that loop over the same elements and share their largest operand, as `graph_kernels` does."""
    found: list[tuple[Node, ...]] = []
    for region in fused:
        if found and (found[-1][0] in forward) == (region[0] in forward) and _is_one_loop(found[-1], region):
            found[-1] = (*found[-1], *region)
        else:
            found.append(region)
    return found


def _is_one_loop(one: Sequence[Node], other: Sequence[Node]) -> bool:
    if any(is_reduction(node.target) or joins_products(node) for node in (*one, *other)):
        return False
    read = [{source_of(operand) for node in region for operand in operands(node)} for region in (one, other)]
    shared = [node_nbytes(source) for source in read[0] & read[1]]
    if read[1] & set(one) or one[-1].meta["val"].numel() != other[-1].meta["val"].numel():
        return False
    return max(shared, default=0) >= min(map(node_nbytes, one))


def _forward(gm: GraphModule) -> set[Node]:
    """Return the nodes that outputs and new values of buffers depend on."""
    queue = [
        value
        for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True)
        if isinstance(value, Node) and output.role is not OutputRole.GRADIENT
    ]
    found: set[Node] = set()
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def _saved(nodes: Sequence[Node], forward: set[Node]) -> tuple[set[Node], set[Node], set[Node]]:
    """Return forward calls whose results are saved for the backward, all values that the backward reads, and the calls that it
    makes again.

    Fusible calls are recomputed from these, unless a call that cannot be fused reads their result: it would be written
    to memory for that call anyway. The partitioner decides alike.
    """
    found, read, remade, seen = set[Node](), set[Node](), set[Node](), set[Node]()
    queue = [value for node in nodes if node not in forward for value in operands(node) if value in forward]
    written = {source_of(value) for value in queue if is_read_by_kernels(value, forward)}
    while queue:
        value = queue.pop()
        node = source_of(value)
        read |= {value, node, *_aliases(value)}
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if node not in written and (is_fusible(node.target) or is_reshard(node)):
            remade.add(node)
            queue.extend(operands(node))
        else:
            found.add(node)
    return found, read, remade


def _aliases(value: Node) -> Iterator[Node]:
    """Yield the views between a value and the call that makes it."""
    while is_alias(value):
        yield value
        value = operands(value)[0]


def is_read_by_kernels(value: Node, others: Collection[Node] = ()) -> bool:
    """Return whether a call that cannot be fused, and is none of `others`, reads a value, perhaps through views."""
    users = (user for user in value.users if user.op != "output" and user not in others)
    return any(
        is_read_by_kernels(user, others) if is_alias(user) else not (is_fusible(user.target) or is_reshard(user))
        for user in users
    )


def _to_gradients(gm: GraphModule) -> set[Node]:
    """Return values that only become gradients, by reshards and casts."""
    found: set[Node] = set()
    kept = {
        value
        for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True)
        if isinstance(value, Node) and output.role is not OutputRole.GRADIENT
    }
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function" or not node.users or node in kept:
            continue
        if all(user.op == "output" or (user in found and len(operands(user)) == 1) for user in node.users):
            found.add(node)
    return found
