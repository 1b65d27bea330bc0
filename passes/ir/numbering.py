"""Renumber the calls of a folded graph, so that names do not depend on the layers that were left out."""

from __future__ import annotations

import re
from dataclasses import replace

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from passes._torch import module_of
from passes.ir.graph import region_of, repeats_of, set_region, set_repeats


def numbered(gm: GraphModule) -> GraphModule:
    """Return a copy of a folded graph with renumbered calls: `mm_297` of 300 becomes `mm_14` of 15.

    So the names are the same whether layers were left out before or after tracing.
    """
    graph, repeats = Graph(), repeats_of(gm)
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        name = re.sub(r"(_\d+)+$", "", node.name)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copies[node].meta = dict(node.meta)
    number_regions(graph)
    new = {node.name: copy.name for node, copy in copies.items() if node.op != "output"}
    removed = {name: new.get(kept, kept) for name, kept in repeats.nodes.items()}
    result = module_of(graph, gm)
    result.meta = dict(gm.meta)
    set_repeats(result, replace(repeats, nodes=new | removed))
    return result


def number_regions(graph: Graph) -> None:
    """Renumber regions in the order of the graph, from 0."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        region = region_of(node)
        if region is not None:
            set_region(node, numbers.setdefault(region, len(numbers)))
