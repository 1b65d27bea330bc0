"""Bound a program's simulated step from below, before its buckets and its order are chosen.

Forward, backward and update run one after the other. Each lasts as long as its kernels, which run one at a time, and as
long as the messages of its busiest link. Those that buckets may join are priced as if all that are alike were one
message: a message never takes longer than its parts, which is also why chunks do not save time on a link.
"""

from __future__ import annotations

from collections import defaultdict

from passes.cost.collective_time import collective_seconds
from passes.cost.forward_backward import phase_of
from passes.cost.program import Program, Task
from passes.cost.scheduling.bucketing import is_movable


def least_step(program: Program, *, are_sent_apart: bool = True) -> float:
    """Return the seconds that a step of `program` takes at least, whatever its order, its buckets and its chunks.

    If messages are not all `are_sent_apart` from products, as with `Overlap(symmetric_memory=True)`, those between
    products are left out.
    """
    parts: dict[int, list[Task]] = defaultdict(list)
    for task in program.tasks:
        parts[phase_of(task)].append(task)
    return sum(_least(program, tasks, are_sent_apart=are_sent_apart) for tasks in parts.values())


def _least(program: Program, tasks: list[Task], *, are_sent_apart: bool) -> float:
    busy: dict[str, float] = defaultdict(float)  # seconds by stream
    alike: dict[tuple[str, str, tuple[str, ...]], list[Task]] = defaultdict(list)
    for task in tasks:
        if is_movable(task):
            alike[task.stream, task.kind, task.axes].append(task)
        elif are_sent_apart or not task.is_collective:
            busy[task.stream] += task.seconds - task.waiting
    for (stream, kind, axes), messages in alike.items():
        busy[stream] += _as_one(program, kind, axes, messages)
    return max(busy.values())


def _as_one(program: Program, kind: str, axes: tuple[str, ...], messages: list[Task]) -> float:
    """Return the seconds of one message instead of several that are alike."""
    hardware = program.mesh.hardware
    assert hardware is not None, "a program has no seconds without hardware"
    nbytes = sum(message.nbytes for message in messages)
    return collective_seconds(kind, nbytes, program.mesh.group_shape(axes), hardware)
