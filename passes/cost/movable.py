"""Which of a program's tasks can move, and how far: what holds of it however it is ordered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from passes.cost.program import OPTIMIZER, Program, Task

NONE, MANY = -1, -2  # ends that a task leads to


@dataclass(frozen=True)
class Unit:
    """A gather of parameters with the kernels that make its operand."""

    tasks: tuple[int, ...]
    reads: tuple[int, ...]  # buffers that other units make
    use: int  # the first task in program order that needs it, or a later unit
    nbytes: int
    stream: int


@dataclass(frozen=True)
class Facts:
    """What holds of a program however it is ordered. Lists are by task."""

    program: Program
    phases: tuple[list[int], ...]  # forward, backward and optimizer
    units: list[Unit]
    missing: list[int]  # operands that tasks make
    is_late: list[bool]
    ends: list[int]  # of kernels that lead to one gradient alone: which; else `NONE` or `MANY`

    @staticmethod
    def of(program: Program) -> Facts:
        makers = program.index.makers
        return Facts(
            program,
            tuple(_phases(program.tasks)),
            _units(program),
            [sum([makers[b] >= 0 for b in inputs]) for inputs in program.index.inputs],
            _late(program),
            _ends(program),
        )

    @cached_property
    def slack(self) -> tuple[int, ...]:
        """Kernels of the backward that lead to one gradient alone, and not to the one that ends last."""
        tasks, in_unit = self.program.tasks, {number for unit in self.units for number in unit.tasks}
        return tuple(
            number
            for number, end in enumerate(self.ends)
            if end >= 0 and not (tasks[number].is_collective or self.is_late[number] or number in in_unit)
        )

    @cached_property
    def slack_seconds(self) -> float:
        return sum(self.program.tasks[number].seconds for number in self.slack)

    @cached_property
    def last_seconds(self) -> float:
        """Of the reduction that ends last, one behind the other where they are several."""
        reductions = (task for task, end in zip(self.program.tasks, self.ends, strict=True) if end == MANY)
        return sum(task.seconds for task in reductions if task.deferrable)

    def last_slack(self, seconds: float) -> list[int]:
        """The last kernels of `slack`, as many as take so long; those with the longest reductions first."""
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


def _phases(tasks: tuple[Task, ...]) -> Iterator[list[int]]:
    """Forward, backward and optimizer."""
    updates = {number for number, task in enumerate(tasks) if task.kind == OPTIMIZER}
    for backward in (False, True):
        yield [n for n, task in enumerate(tasks) if task.backward is backward and n not in updates]
    yield sorted(updates)


def _units(program: Program) -> list[Unit]:
    """Gathers of parameters in the order of use, each with what it needs and none before it had."""
    index, tasks = program.index, program.tasks
    gathers = [number for number, task in enumerate(tasks) if task.prefetchable]
    members = {*gathers, *_behind(program, gathers)}
    uses = [len(tasks)] * len(tasks)
    for number in sorted(members, reverse=True):
        readers = [reader for buffer in index.outputs[number] for reader in index.readers[buffer]]
        uses[number] = min((uses[r] if r in members else r for r in readers), default=len(tasks))
    units, taken = [], set(gathers)
    for number in sorted(gathers, key=lambda n: (tasks[n].backward, uses[n], n)):
        kernels = sorted(n for n in _behind(program, [number]) if n not in taken)
        taken.update(kernels)
        made = {buffer for n in kernels for buffer in index.outputs[n]}
        reads = [b for n in (*kernels, number) for b in index.inputs[n] if index.makers[b] >= 0 and b not in made]
        nbytes = sum(program.buffers[buffer].nbytes for buffer in index.outputs[number])
        use = min(uses[n] for n in (*kernels, number))
        units.append(Unit((*kernels, number), tuple(reads), use, nbytes, index.streams[number]))
    dues = list(accumulate((unit.use for unit in reversed(units)), min))
    return [replace(unit, use=due) for unit, due in zip(units, reversed(dues), strict=True)]


def _behind(program: Program, numbers: list[int]) -> set[int]:
    """Tasks of the same direction that others wait for."""
    index = program.index
    found: set[int] = set()
    queue = list(numbers)
    while queue:
        number = queue.pop()
        for buffer in index.inputs[number]:
            maker = index.makers[buffer]
            if maker >= 0 and maker not in found and program.tasks[maker].backward is program.tasks[number].backward:
                found.add(maker)
                queue.append(maker)
    return found


def _late(program: Program) -> list[bool]:
    """Per task, whether it reads what comes of a gradient's reduction."""
    index = program.index
    late = [False] * len(program.tasks)
    for number, task in enumerate(program.tasks):
        makers = (index.makers[buffer] for buffer in index.inputs[number])
        late[number] = task.kind != OPTIMIZER and any(late[m] or program.tasks[m].deferrable for m in makers if m >= 0)
    return late


def _ends(program: Program) -> list[int]:
    """Per kernel of the backward, the one reduction or gradient that it leads to; `MANY`, or `NONE`.

    The reduction of each phase that can start last of all has what leads to it as its path: that leads to `MANY`.
    """
    index, tasks = program.index, program.tasks
    ends = [NONE] * len(tasks)
    for number in reversed(range(len(tasks))):
        task = tasks[number]
        if task.kind == OPTIMIZER or not task.backward:
            continue
        found = {end for b in index.outputs[number] for r in index.readers[b] if (end := ends[r]) != NONE}
        if task.deferrable or any(program.buffers[b].kind == "gradient" for b in index.outputs[number]):
            ends[number] = min(found, default=number)
        elif found:
            ends[number] = found.pop() if len(found) == 1 else MANY
    last = _last(program, ends)
    return [MANY if end == last else end for end in ends]


def _last(program: Program, ends: list[int]) -> int:
    """The end that is furthest from where the backward starts."""
    index, tasks = program.index, program.tasks
    heads = [0.0] * len(tasks)
    for number, task in enumerate(tasks):
        makers = (index.makers[buffer] for buffer in index.inputs[number])
        heads[number] = task.seconds + max((heads[m] for m in makers if m >= 0), default=0.0)
    return max((n for n, end in enumerate(ends) if end == n), key=lambda n: heads[n], default=NONE)
