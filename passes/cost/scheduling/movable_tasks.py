"""Find which tasks of a program may move and how far, for list scheduling; the result is the same in any order.

Three kinds can move: gathers of parameters, which may start early; reductions of gradients, which may end late; and the
kernels that lead to one gradient alone, which may wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from passes.cost.program import OPTIMIZER, Program
from passes.cost.simulate import Timeline, simulate

NONE, MANY = -1, -2  # instead of the one gradient that a task leads to: it leads to none, or to several


@dataclass(frozen=True)
class Prefetch:
    """A gather of parameters with the kernels that compute its operand."""

    tasks: tuple[int, ...]
    reads: tuple[int, ...]  # buffers that tasks outside of it write
    latest: int  # the turn at which it is issued, if not before: its own, or an earlier one of another that needs it issued
    nbytes: int  # of the gathered result
    stream: int


@dataclass(frozen=True)
class MovableTasks:
    """The properties of a program that hold in any order. Lists are by task."""

    program: Program
    phases: tuple[list[int], ...]  # forward, backward and optimizer
    prefetches: list[Prefetch]
    is_late: list[bool]  # whether it reads the result of a gradient's reduction
    ends: list[int]  # of tasks that lead to one gradient alone: which; else `NONE` or `MANY`
    last: set[int]  # reductions of the gradient that is computed last

    @staticmethod
    def of(program: Program) -> MovableTasks:
        """Find the movable tasks of a program."""
        return MovableTasks(
            program,
            tuple([number for number, call in enumerate(program.index.calls) if call == phase] for phase in range(3)),
            _prefetches(program),
            _late(program),
            *_ends(program),
        )

    @cached_property
    def given(self) -> Timeline:
        """Return the timeline of the program in its own order."""
        return simulate(self.program)

    @cached_property
    def in_prefetch(self) -> set[int]:
        """Return the tasks of the prefetches."""
        return {number for one in self.prefetches for number in one.tasks}

    @cached_property
    def slack(self) -> tuple[int, ...]:
        """Return the kernels of the backward that lead to one gradient alone, which is not the last one."""
        streams, in_prefetch = self.program.index.streams, self.in_prefetch
        return tuple(
            number
            for number, end in enumerate(self.ends)
            if end >= 0 and not (streams[number] or self.is_late[number] or number in in_prefetch)
        )

    @cached_property
    def slack_seconds(self) -> float:
        """Return the seconds that the kernels of `slack` take."""
        return sum(self.program.tasks[number].seconds for number in self.slack)

    @cached_property
    def last_seconds(self) -> float:
        """Return the seconds of the reductions of the last gradient, one after another."""
        return sum(self.program.tasks[number].seconds for number in self.last)

    def last_slack(self, seconds: float) -> list[int]:
        """Return the last kernels of `slack` that take at most `seconds`; those with the longest reductions first."""
        tasks, found = self.program.tasks, list[int]()
        for number in reversed(self.slack):
            seconds -= tasks[number].seconds
            if seconds < 0:
                break
            found.append(number)
        reductions = dict.fromkeys((self.ends[number] for number in found), 0.0)
        for task, end in zip(tasks, self.ends, strict=True):
            if end in reductions and task.deferrable:
                reductions[end] += task.seconds
        return sorted(found, key=lambda number: (-reductions[self.ends[number]], self.ends[number], number))


def _prefetches(program: Program) -> list[Prefetch]:
    """Return the gathers of parameters in the order of use, each with the kernels that no earlier one has.

    A kernel whose result other tasks read, too, belongs to none: it runs in its own turn.
    """
    index, tasks = program.index, program.tasks
    gathers = [number for number, task in enumerate(tasks) if task.prefetchable]
    members, needed = set(gathers), _dependencies(program, gathers)
    for number in sorted(needed, reverse=True):
        if all([reader in members for reader in index.targets[number]]):
            members.add(number)
    uses = [len(tasks)] * len(tasks)
    for number in sorted(members, reverse=True):
        uses[number] = min([uses[r] if r in members else r for r in index.targets[number]], default=len(tasks))
    found, taken = [], {*gathers, *needed - members}
    for number in sorted(gathers, key=lambda n: (tasks[n].backward, uses[n], n)):
        kernels = sorted(n for n in _dependencies(program, [number]) if n not in taken)
        taken.update(kernels)
        made = {buffer for n in kernels for buffer in index.outputs[n]}
        reads = [b for n in (*kernels, number) for b in index.inputs[n] if index.makers[b] >= 0 and b not in made]
        nbytes = sum(program.buffers[buffer].nbytes for buffer in index.outputs[number])
        latest = min([number, *(uses[n] for n in kernels)])
        found.append(Prefetch((*kernels, number), tuple(reads), latest, nbytes, index.streams[number]))
    dues = list(accumulate((one.latest for one in reversed(found)), min))
    return [replace(one, latest=due) for one, due in zip(found, reversed(dues), strict=True)]


def _dependencies(program: Program, numbers: list[int]) -> set[int]:
    """Return the tasks of the same direction (forward or backward) that the given ones depend on."""
    index = program.index
    found: set[int] = set()
    queue = list(numbers)
    while queue:
        number = queue.pop()
        for maker in index.sources[number]:
            if maker not in found and program.tasks[maker].backward is program.tasks[number].backward:
                found.add(maker)
                queue.append(maker)
    return found


def _late(program: Program) -> list[bool]:
    """Return, per task, whether it depends on a gradient's reduction."""
    late = [False] * len(program.tasks)
    comes_late = [task.deferrable for task in program.tasks]  # it is a reduction itself, or depends on one
    for number, (task, sources) in enumerate(zip(program.tasks, program.index.sources, strict=True)):
        if task.kind != OPTIMIZER and any([comes_late[source] for source in sources]):
            late[number] = comes_late[number] = True
    return late


def _ends(program: Program) -> tuple[list[int], set[int]]:
    """Return, per task of the backward, the one end that it leads to (or `MANY`, `NONE`), and the reductions of the last end.

    An end is a reduction or a gradient, by the number of its task. Where a copy joins several values for one message, each
    value is an end of its own: its buffer's number plus the number of tasks. The end with the longest path from the start
    of the backward is the last one; its path is critical, so it counts as leading to `MANY`.
    """
    index, tasks = program.index, program.tasks
    ends, joins = [NONE] * len(tasks), _joins(program)
    heads: dict[int, float] = {}  # by end, seconds of the longest path to it
    paths = _longest_paths(program)
    for number in reversed(range(len(tasks))):
        task = tasks[number]
        if task.kind == OPTIMIZER or not task.backward:
            continue
        found: set[int] = set()
        for buffer in index.outputs[number]:
            for reader in index.readers[buffer]:
                if joins[reader]:
                    heads[len(tasks) + buffer] = paths[number]
                    found.add(len(tasks) + buffer)
                elif ends[reader] != NONE:
                    found.add(ends[reader])
        if task.deferrable or "gradient" in [program.buffers[buffer].kind for buffer in index.outputs[number]]:
            ends[number] = min(found, default=number)
            heads[ends[number]] = max(paths[number], heads.get(ends[number], 0.0))
        elif found:
            ends[number] = found.pop() if len(found) == 1 else MANY
    last = max(heads, key=lambda end: (heads[end], -end), default=NONE)
    messages = {number for number, end in enumerate(ends) if end == last and tasks[number].deferrable}
    if last >= len(tasks):
        after = {ends[reader] for reader in index.readers[last - len(tasks)]}
        messages |= {number for number, end in enumerate(ends) if end in after and tasks[number].deferrable}
    return [MANY if end == last else end for end in ends], messages


def _joins(program: Program) -> list[bool]:
    """Return, per task, whether it is a kernel that joins several values for reductions of gradients."""
    index, tasks = program.index, program.tasks
    return [
        stream == 0 and len(inputs) > 1 and bool(readers) and all([tasks[reader].deferrable for reader in readers])
        for stream, inputs, readers in zip(index.streams, index.inputs, index.targets, strict=True)
    ]


def _longest_paths(program: Program) -> list[float]:
    """Return, per task, the seconds of the longest path up to its end."""
    paths: list[float] = []
    for seconds, sources in zip(program.index.seconds, program.index.sources, strict=True):
        paths.append(seconds + max([paths[source] for source in sources], default=0.0))
    return paths
