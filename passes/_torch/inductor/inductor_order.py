"""The order in which Inductor's code runs kernels, collectives and waits: that of the graph."""

from __future__ import annotations

import heapq
from typing import Any

from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import NodeUser, SchedulerNode
from torch._inductor.utils import contains_collective
from torch.fx import Node


class JoinsBetweenCollectives(CustomSchedulerPass):
    """Make a kernel wait for the last collective that the graph has before it, until kernels are joined.

    So none of those that lead to a collective is joined with one after it: it would hold that collective back, and with
    it all that come after, since a joined kernel runs where the last of its calls stood.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        found, sent = _in_order(nodes), None
        for node in found:
            if contains_collective(node):
                sent = node.get_outputs()[0]
            elif sent is not None and isinstance(node, SchedulerNode):
                own = next(iter(node.get_buffer_names()))
                node.add_fake_dep(WeakDep(sent.get_name(), mutating_buf=own, is_fake=True))
                sent.set_users([*sent.users, NodeUser(node, is_weak=True)])
        if sent is not None:
            scheduler = nodes[0].scheduler
            scheduler.nodes = found
            scheduler.compute_ancestors()
        return found

    def uuid(self) -> str:
        return "autoshard: joins between collectives, 1"


class GraphOrder(CustomSchedulerPass):
    """Put kernels, collectives and waits in the order of the graph, a joined kernel where the last of its calls stood.

    Without it a kernel stands where the first of its calls stood, and what the last one waits for before it; and
    where a value's readers make it again, its kernel stands with the first reader.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return _in_order(nodes)

    def uuid(self) -> str:
        return "autoshard: the order of the graph, 1"


def _in_order(nodes: list[Any]) -> list[Any]:
    """Return nodes of Inductor's scheduler, each after what it waits for; of those that can run, the one that stands first."""
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


def _place(scheduled: Any, places: dict[Node, int]) -> int:
    """Return where the last call that a node of Inductor's scheduler runs stands in its graph; 0 where it runs none."""
    origins = [origin for part in scheduled.get_nodes() for origin in part.node.get_origins()]
    for graph in {origin.graph for origin in origins if origin not in places}:
        places |= {node: number for number, node in enumerate(graph.nodes)}
    return max((places.get(origin, 0) for origin in origins), default=0)
