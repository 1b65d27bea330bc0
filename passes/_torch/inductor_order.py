"""The order in which Inductor's code runs kernels, collectives and waits: that of the graph."""

from __future__ import annotations

import heapq
from typing import Any

from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch.fx import Node


class GraphOrder(CustomSchedulerPass):
    """Put kernels, collectives and waits in the order of the graph, a joined kernel where the last of its calls stood.

    Without it a kernel stands where the first of its calls stood, and what the last one waits for in front of it; and
    where a value's readers make it again, its kernel stands with the first reader.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        makers = {name: number for number, node in enumerate(nodes) for name in node.get_buffer_names()}
        readers: list[list[int]] = [[] for _ in nodes]
        missing = [0] * len(nodes)
        for number, node in enumerate(nodes):
            sources = {makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {number}
            missing[number] = len(sources)
            for source in sources:
                readers[source].append(number)
        places: dict[Node, int] = {}
        keys = [_place(node, places) for node in nodes]
        ready = [(keys[number], number) for number, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        found: list[Any] = []
        while ready:
            _, number = heapq.heappop(ready)
            found.append(nodes[number])
            for reader in readers[number]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (keys[reader], reader))
        assert len(found) == len(nodes), "Inductor's nodes wait for each other"
        return found

    def uuid(self) -> str:
        return "autoshard: the order of the graph, 1"


def _place(scheduled: Any, places: dict[Node, int]) -> int:
    """Where the last call that a node of Inductor's scheduler runs stands in its graph; 0 where it runs none."""
    origins = [origin for part in scheduled.get_nodes() for origin in part.node.get_origins()]
    for graph in {origin.graph for origin in origins if origin not in places}:
        places |= {node: number for number, node in enumerate(graph.nodes)}
    return max((places.get(origin, 0) for origin in origins), default=0)
