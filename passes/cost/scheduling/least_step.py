"""Bound a simulated step from below: that of a program before its buckets and its order are chosen, or that of a graph before
it is partitioned.

Forward, backward and update run one after the other. Each lasts as long as its kernels, which run one at a time, and as
long as the messages of its busiest link. Those that buckets may join are priced as if all that are alike were one
message: a message never takes longer than its parts, which is also why chunks do not save time on a link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from passes.cost.build_program import program_of_graph
from passes.cost.collective_time import collective_seconds
from passes.cost.forward_backward import phase_of
from passes.cost.fused_regions import is_alias, is_generated
from passes.cost.program import Program, Task
from passes.cost.scheduling.bucketing import is_movable
from passes.cost.unroll import unroll
from passes.ir.folded_layers import Repeats
from passes.ir.mesh import Mesh

aten = torch.ops.aten

FUSED_BY_PATTERNS = (aten.bmm.default, aten.baddbmm.default)  # Inductor may find attention that is written with these


def least_step(program: Program, *, are_sent_apart: bool = True) -> float:
    """Return the seconds that a step of `program` takes at least, whatever its order, its buckets and its chunks.

    If messages are not all `are_sent_apart` from products, as with `Overlap(symmetric_memory=True)`, those between
    products are left out.
    """
    parts: dict[int, list[Task]] = defaultdict(list)
    for task in program.tasks:
        parts[phase_of(task)].append(task)
    return sum(_least(program, tasks, is_movable, are_sent_apart=are_sent_apart) for tasks in parts.values())


def least_of_graph(gm: GraphModule, mesh: Mesh, repeats: Repeats, *, are_sent_apart: bool = True) -> float:
    """Return the seconds that a step of a folded LOCAL graph takes at least, however it is partitioned.

    Only messages and kernels that every partition has count: operators with a kernel of their own, of equal calls the first.
    Which part of a step a call is in, and which messages may be joined, is not known yet: all may.

    Raises UnlikeLayersError as `unroll` does.
    """
    counted = set(_in_every_partition(gm.graph))
    program = program_of_graph(gm, mesh, fused=False)
    tasks = (task if counted.issuperset(task.nodes) else replace(task, seconds=0.0) for task in program.tasks)
    program = unroll(replace(program, tasks=tuple(tasks)), repeats)
    counting = [task for task in program.tasks if task.seconds > 0.0]
    return _least(program, counting, lambda task: task.is_collective and are_sent_apart, are_sent_apart=are_sent_apart)


def _in_every_partition(graph: Graph) -> Iterator[str]:
    """Yield the names of messages and operators that are neither fused nor left out, of equal calls the first."""
    first: dict[str, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            same[node] = node
            continue
        call = node.target, map_arg(node.args, same.__getitem__), map_arg(node.kwargs, same.__getitem__)
        same[node] = first.setdefault(str(call), node)
        is_kernel = not (is_alias(node) or is_generated(node) or node.target in FUSED_BY_PATTERNS)
        if same[node] is node and is_kernel:
            yield node.name


def _least(program: Program, tasks: Collection[Task], may_join: Callable[[Task], bool], *, are_sent_apart: bool) -> float:
    busy: dict[str, float] = defaultdict(float)  # seconds by stream
    alike: dict[tuple[str, str, tuple[str, ...]], list[Task]] = defaultdict(list)
    for task in tasks:
        if may_join(task):
            alike[task.stream, task.kind, task.axes].append(task)
        elif are_sent_apart or not task.is_collective:
            busy[task.stream] += task.seconds - task.waiting
    for (stream, kind, axes), messages in alike.items():
        busy[stream] += _as_one(program, kind, axes, messages)
    return max(busy.values(), default=0.0)


def _as_one(program: Program, kind: str, axes: tuple[str, ...], messages: list[Task]) -> float:
    """Return the seconds of one message instead of several that are alike."""
    hardware = program.mesh.hardware
    assert hardware is not None, "a program has no seconds without hardware"
    nbytes = sum(message.nbytes for message in messages)
    return collective_seconds(kind, nbytes, program.mesh.group_shape(axes), hardware)
