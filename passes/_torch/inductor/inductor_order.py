"""Scheduler passes that make Inductor run kernels, collectives and waits in the order of the graph."""

from __future__ import annotations

import heapq
from typing import Any

from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import NodeUser, SchedulerNode
from torch._inductor.utils import contains_collective
from torch.fx import Node


class JoinsBetweenCollectives(CustomSchedulerPass):
    """Keep Inductor from fusing kernels across collectives: each kernel depends on the last collective before it.

    A fused kernel runs where the last of its calls stood. If a kernel that a collective waits for were fused with one
    after it, it would delay that collective, and with it all later ones.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        found, sent = _in_order(nodes), None
        for node in found:
            if contains_collective(node):
                sent = node.get_outputs()[0]
            elif sent is not None and isinstance(node, SchedulerNode):
                # The kernel mutates nothing: with a buffer for `mutating_buf`, fusing looks up what that buffer overwrites.
                node.add_fake_dep(WeakDep(sent.get_name(), mutating_buf=node.get_name(), is_fake=True))
                sent.set_users([*sent.users, NodeUser(node, is_weak=True)])
        if sent is not None:
            scheduler = nodes[0].scheduler
            scheduler.nodes = found
            scheduler.compute_ancestors()
        return found

    def uuid(self) -> str:
        return "autoshard: joins between collectives, 2"


class GraphOrder(CustomSchedulerPass):
    """Put kernels, collectives and waits in the order of the graph, a fused kernel where the last of its calls stood.

    Otherwise Inductor puts a fused kernel where the first of its calls stood, and before it all that the last one waits
    for; a value that its readers recompute is put with its first reader.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return _in_order(nodes)

    def uuid(self) -> str:
        return "autoshard: the order of the graph, 1"


def _in_order(nodes: list[Any]) -> list[Any]:
    """Return scheduler nodes, each after its dependencies; of those that are ready, the first in the graph comes
    first."""
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
    """Return the position in its graph of the last call that a scheduler node runs, 0 if it runs none."""
    origins = [origin for part in scheduled.get_nodes() for origin in part.node.get_origins()]
    for graph in {origin.graph for origin in origins if origin not in places}:
        places |= {node: number for number, node in enumerate(graph.nodes)}
    return max((places.get(origin, 0) for origin in origins), default=0)
