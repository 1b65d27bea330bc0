"""Tie the nodes of a graph that take the same strategy: those at the same place of equal layers.

Layers are equal if they are the same calls in the same order; their neighbours may differ, as for the first and the
last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from passes.ir.equal_layers import Indexed, Layers, depth_of
from passes.ir.graph import input_of, pins_of, repeats_of


@dataclass(frozen=True)
class TiedLayers:
    """The ties of a graph.

    `leader[node]` is the first node that takes the same strategy; `count[node]` is how many nodes of the whole model
    the node stands for (more than 1 in a folded graph); `layer[node]` names the layer, "" outside of all.
    """

    leader: Mapping[Node, Node]
    count: Mapping[Node, int]
    layer: Mapping[Node, str]


def tied_layers(gm: GraphModule) -> TiedLayers:
    """Return the ties of a CAPTURED graph, folded or not. Parameters with different pins are not tied."""
    graph = _with_casts(Indexed.of(gm.graph, _tags(gm)))
    levels = [_tied(Layers.of(graph, level)) for level in range(depth_of(graph))]
    first, layer = max(levels, key=lambda tied: len(tied[0]) - len(set(tied[0].values())), default=({}, {}))
    stands_for: dict[str, int] = {}
    for kept in repeats_of(gm).nodes.values():
        stands_for[kept] = stands_for.get(kept, 0) + 1
    count = {node: stands_for.get(node.name, 1) for node in graph.nodes}
    layers: dict[str, int] = {}  # parameters, and calls that passes added after the folding, count as their layer's
    for node, name in layer.items():
        layers[name] = max(layers.get(name, 1), count[node])
    count |= {node: layers[name] for node, name in layer.items()}
    return TiedLayers(
        {node: first.get(node, node) for node in graph.nodes},
        count,
        {node: layer.get(node, "") for node in graph.nodes},
    )


def _with_casts(graph: Indexed) -> Indexed:
    """Assign calls without a module whose operands are parameters alone, such as casts, to the parameters' module."""
    fqns = list(graph.fqns)
    for i, inputs in enumerate(graph.inputs):
        if not fqns[i] and inputs and all(graph.nodes[j].op == "placeholder" for j in inputs):
            fqns[i] = fqns[inputs[0]].rpartition(".")[0]
    return replace(graph, fqns=tuple(fqns))


def _tags(gm: GraphModule) -> dict[str, str]:
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder" and pins_of(node)]
    return {input_of(node).name: str(pins_of(node)) for node in nodes}


def _tied(layers: Layers) -> tuple[dict[Node, Node], dict[Node, str]]:
    nodes = layers.graph.nodes
    first: dict[Node, Node] = {}
    layer: dict[Node, str] = {}
    leaders: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for prefix, indices in layers.lists():
        for index in indices:
            members = layers.members[prefix, index]
            calls = tuple(layers.named[i] for i in members)
            leader = leaders.setdefault((prefix, calls), members)
            first |= {nodes[i]: nodes[j] for i, j in zip(members, leader, strict=True)}
            layer |= {nodes[i]: f"{prefix}.{index}" for i in members}
    return first, layer
