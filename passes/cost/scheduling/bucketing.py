"""Choose which collectives of parameters and of gradients share a message, and join them in a program.

`bucket_collectives` joins the same ones in a graph. A folded graph is planned without buckets, so that its layers stay
equal; its unrolled program is bucketed here.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from passes.cost.collective_time import collective_seconds
from passes.cost.kernel_time import region_seconds
from passes.cost.program import COMPUTE, Buffer, Program, Task
from passes.ir.collectives import KINDS

Sort = tuple[tuple[str, ...], str]  # the mesh axes and the dtype of messages


@dataclass(frozen=True)
class Growing:
    """Buckets that get larger, each twice the one before: the first ones are full early, so a link is used early."""

    most: int  # bytes of the largest

    def limit(self, number: int) -> int:
        """Return the bytes of a bucket by its number, from 0."""
        return min(self.most, self.most // FIRST << number)


@dataclass(frozen=True)
class Hidden:
    """Buckets for messages that hide: they delay kernels by a part of their seconds only, but copies by all of theirs.

    A message shares a bucket if, at best, this shortens that delay by more than its copies take.
    """

    most: int  # bytes of the largest

    def limit(self, number: int) -> int:
        """Return the bytes of a bucket, which are the same for all."""
        return self.most


Size = int | Growing | Hidden  # bytes of the largest bucket; 0: none is joined
Sizes = Mapping[Sort, Size]
FIRST = 64  # times fewer bytes in the first of growing buckets: of 64 MiB, the 1 MiB with which DDP begins
SMALLER = 16  # the small bucket size tried is the limit / 16: of 400 MiB, the 25 MiB of DDP (bucket_cap_mb)


def sizes(limit: int) -> tuple[int, ...]:
    """Return the bucket sizes to try, in bytes: none, small ones and the largest."""
    return (0, limit // SMALLER, limit)


def bucket(program: Program, nbytes: Size | Sizes) -> Program:
    """Return `program` with its `buckets` of at most `nbytes`: one size for all sorts, or one for each."""
    bucketing = Bucketing(program)
    return bucketing.joined(bucketing.buckets(nbytes))


def buckets(program: Program, nbytes: Size | Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the `neighbours` that delay kernels less as one collective than as several, copies included."""
    return Bucketing(program).buckets(nbytes)


class Bucketing:
    """Joins the messages of a program by several bucket sizes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._levels = _levels(program)
        self._joins: dict[tuple[int, ...], tuple[tuple[Task, ...], tuple[Buffer, ...]]] = {}

    def buckets(self, nbytes: Size | Sizes) -> tuple[tuple[int, ...], ...]:
        """Return the neighbours that delay kernels less as one collective of at most `nbytes` than as several."""
        found = _neighbours(self.program, self._levels, nbytes)
        return tuple(members for members in found if self._is_faster(members, _size(self.program.tasks[members[0]], nbytes)))

    def joined(self, joinable: Sequence[tuple[int, ...]]) -> Program:
        """Return the program with these buckets.

        A bucket of gathers takes the place of its first member, one of reductions that of its last. One kernel copies the
        members' operands together, another one copies the results apart.
        """
        program = self.program
        if not joinable:
            return program
        places: dict[str, int] = {}
        tasks = {task.name: task for task in program.tasks}
        buffers = list(program.buffers)
        for members in joinable:
            for number in members:
                del tasks[program.tasks[number].name]
            joined, more = self._join(members)
            place = members[0] if program.tasks[members[0]].prefetchable else members[-1]
            for task in joined:
                tasks[task.name] = task
                places[task.name] = place
            buffers += more
        return replace(program, tasks=_in_order(program, list(tasks.values()), places), buffers=tuple(buffers))

    def _is_faster(self, members: tuple[int, ...], size: Size) -> bool:
        (sent, message, received), _ = self._join(members)
        saved = sum(self.program.tasks[number].seconds for number in members) - message.seconds
        return sent.seconds + received.seconds < saved * _delay(self.program, size)

    def _join(self, members: tuple[int, ...]) -> tuple[tuple[Task, ...], tuple[Buffer, ...]]:
        if members not in self._joins:
            self._joins[members] = _join(self.program, members)
        return self._joins[members]


def seconds_by_sort(program: Program) -> dict[Sort, float]:
    """Return the seconds of the messages that can be joined, by sort."""
    found: dict[Sort, float] = {}
    for task in filter(is_movable, program.tasks):
        found[_sort(task)] = found.get(_sort(task), 0.0) + task.seconds
    return found


def _sort(task: Task) -> Sort:
    return task.axes, task.dtype


def neighbours(program: Program, nbytes: Size | Sizes) -> list[tuple[int, ...]]:
    """Return groups of two or more collectives, by number, that can share a message of at most `nbytes` (larger side).

    Members have the same kind, reduction, group, dtype and direction, are neighbours in the program, and are the same number
    of collectives away from the parameter or the gradient, so that a bucket never waits for itself.
    """
    return _neighbours(program, _levels(program), nbytes)


def _neighbours(program: Program, levels: list[int], nbytes: Size | Sizes) -> list[tuple[int, ...]]:
    found: list[list[int]] = []
    open_: dict[object, tuple[list[int], int]] = {}
    closed: dict[object, int] = {}
    for number, task in enumerate(program.tasks):
        if not is_movable(task) or not task.nbytes:
            continue
        key = (task.kind, task.reduction, task.axes, task.dtype, task.backward, levels[number])
        size = _size(task, nbytes)
        if not size or (isinstance(size, Hidden) and not _is_worth_copying(program, number, size)):
            continue
        members, filled = open_.get(key, ([], 0))
        if not members or filled + task.nbytes > _limit(size, closed[key]):
            closed[key] = closed.get(key, -1) + 1
            members, filled = [], 0
            found.append(members)
        members.append(number)
        open_[key] = members, filled + task.nbytes
    return [tuple(members) for members in found if len(members) > 1]


def _size(task: Task, nbytes: Size | Sizes) -> Size:
    return nbytes[_sort(task)] if isinstance(nbytes, Mapping) else nbytes


def _limit(size: Size, number: int) -> int:
    return size if isinstance(size, int) else size.limit(number)


def _delay(program: Program, size: Size) -> float:
    """Return the seconds by which a message that takes a second delays kernels: all of it, unless it hides."""
    return program.contention.delay if isinstance(size, Hidden) else 1.0


def _is_worth_copying(program: Program, number: int, size: Hidden) -> bool:
    """Return whether copies of a message take less than what is saved where it is a part of the largest bucket."""
    task, index, hardware = program.tasks[number], program.index, program.mesh.hardware
    assert hardware is not None
    largest = max(size.most, task.nbytes)
    share = collective_seconds(task.kind, largest, program.mesh.group_shape(task.axes), hardware) * task.nbytes / largest
    copied = 2 * sum(program.buffers[b].nbytes for b in (*index.inputs[number], *index.outputs[number]))
    return copied / hardware.memory_bandwidth < (task.seconds - share) * _delay(program, size)


def is_movable(task: Task) -> bool:
    bucket = KINDS[task.kind].bucket if task.kind in KINDS else None
    if bucket is None:
        return False
    return task.prefetchable if bucket == "gather" else task.deferrable


def _levels(program: Program) -> list[int]:
    """Return, per task, the collectives between a gather and the parameters, or between a reduction and the gradients."""
    index, tasks = program.index, program.tasks
    counts = [int(stream > 0) for stream in index.streams]
    levels = [0] * len(tasks)
    for number, sources in enumerate(index.sources):
        levels[number] = max([levels[source] + counts[source] for source in sources], default=0)
    ahead = [0] * len(tasks)
    for number in reversed(range(len(tasks))):
        ahead[number] = max([ahead[target] + counts[target] for target in index.targets[number]], default=0)
    return [ahead[n] if task.deferrable and not task.prefetchable else levels[n] for n, task in enumerate(tasks)]


def _join(program: Program, members: Sequence[int]) -> tuple[tuple[Task, ...], tuple[Buffer, ...]]:
    """Return a bucket's tasks (copy together, one collective, copy apart) and the buffers between them."""
    tasks, index, buffers = [program.tasks[n] for n in members], program.index, program.buffers
    assert program.mesh.hardware is not None
    first, hardware = tasks[0], program.mesh.hardware
    sent = sum(buffers[b].nbytes for number in members for b in index.inputs[number])
    received = sum(buffers[b].nbytes for number in members for b in index.outputs[number])
    nbytes = sum(task.nbytes for task in tasks)
    name = f"{first.name}+{len(tasks) - 1}"
    kind = "gathered" if first.prefetchable else "temporary"
    given = Buffer(f"{name}.sent", sent, kind, first.fqn, backward=first.backward)
    made = Buffer(f"{name}.received", received, kind, first.fqn, backward=first.backward)
    group = program.mesh.group_shape(first.axes)
    collective = replace(
        first,
        name=name,
        seconds=collective_seconds(first.kind, nbytes, group, hardware),
        inputs=(given.name,),
        outputs=(made.name,),
        nbytes=nbytes,
        nodes=tuple(node for task in tasks for node in task.nodes),
        steps=tuple(step for task in tasks for step in task.steps),
    )
    inputs = tuple(name for task in tasks for name in task.inputs)
    outputs = tuple(name for task in tasks for name in task.outputs)
    copies = [
        Task(copy.name, "compute", COMPUTE, 0.0, reads, makes, nbytes=2 * copy.nbytes, fqn=first.fqn)
        for copy, reads, makes in ((given, inputs, (given.name,)), (made, (made.name,), outputs))
    ]
    copies = [
        replace(copy, seconds=region_seconds(0.0, copy.nbytes, hardware), backward=first.backward) for copy in copies
    ]
    return (copies[0], collective, copies[1]), (given, made)


def _in_order(program: Program, tasks: list[Task], joined: dict[str, int]) -> tuple[Task, ...]:
    """Return the tasks in their order, a bucket's in its place, with the tasks that write its operands before it."""
    places = {task.name: number for number, task in enumerate(program.tasks)} | joined
    makers = {name: task for task in tasks for name in task.outputs}
    early = [task for task in tasks if task.name in joined]
    while early:
        task = early.pop()
        for maker in (makers[name] for name in task.inputs if name in makers):
            if places[maker.name] > places[task.name]:
                places[maker.name] = places[task.name]
                early.append(maker)
    readers: dict[str, list[Task]] = {}
    missing: dict[str, int] = {}
    for task in tasks:
        missing[task.name] = sum(name in makers for name in task.inputs)
        for name in task.inputs:
            readers.setdefault(name, []).append(task)
    ready = [(places[task.name], number, task) for number, task in enumerate(tasks) if missing[task.name] == 0]
    heapq.heapify(ready)
    numbers = {task.name: number for number, task in enumerate(tasks)}
    found: list[Task] = []
    while ready:
        task = heapq.heappop(ready)[-1]
        found.append(task)
        for name in task.outputs:
            for reader in readers.get(name, ()):
                missing[reader.name] -= 1
                if missing[reader.name] == 0:
                    heapq.heappush(ready, (places[reader.name], numbers[reader.name], reader))
    assert len(found) == len(tasks), "a bucket waits for itself"
    return tuple(found)
