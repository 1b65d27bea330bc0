"""Which of a program's tasks can move, and how far: what holds of it however it is ordered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from passes.cost.program import OPTIMIZER, Program
from passes.cost.simulate import Timeline, simulate

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
    ends: list[int]  # of tasks that lead to one gradient alone: which; else `NONE` or `MANY`
    last: set[int]  # reductions of the gradient that is made last

    @staticmethod
    def of(program: Program) -> Facts:
        return Facts(
            program,
            tuple([number for number, call in enumerate(program.index.calls) if call == phase] for phase in range(3)),
            _units(program),
            [len(sources) for sources in program.index.sources],
            _late(program),
            *_ends(program),
        )

    @cached_property
    def given(self) -> Timeline:
        """As the program stands."""
        return simulate(self.program)

    @cached_property
    def in_unit(self) -> set[int]:
        """Tasks of the units."""
        return {number for unit in self.units for number in unit.tasks}

    @cached_property
    def slack(self) -> tuple[int, ...]:
        """Kernels of the backward that lead to one gradient alone, and not to the one that ends last."""
        streams, in_unit = self.program.index.streams, self.in_unit
        return tuple(
            number
            for number, end in enumerate(self.ends)
            if end >= 0 and not (streams[number] or self.is_late[number] or number in in_unit)
        )

    @cached_property
    def slack_seconds(self) -> float:
        return sum(self.program.tasks[number].seconds for number in self.slack)

    @cached_property
    def last_seconds(self) -> float:
        """Of the reduction that ends last, one behind the other where they are several."""
        return sum(self.program.tasks[number].seconds for number in self.last)

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


def _units(program: Program) -> list[Unit]:
    """Gathers of parameters in the order of use, each with what it needs and none before it had."""
    index, tasks = program.index, program.tasks
    gathers = [number for number, task in enumerate(tasks) if task.prefetchable]
    members = {*gathers, *_behind(program, gathers)}
    uses = [len(tasks)] * len(tasks)
    for number in sorted(members, reverse=True):
        uses[number] = min([uses[r] if r in members else r for r in index.targets[number]], default=len(tasks))
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
        for maker in index.sources[number]:
            if maker not in found and program.tasks[maker].backward is program.tasks[number].backward:
                found.add(maker)
                queue.append(maker)
    return found


def _late(program: Program) -> list[bool]:
    """Per task, whether it reads what comes of a gradient's reduction."""
    late = [False] * len(program.tasks)
    comes_late = [task.deferrable for task in program.tasks]  # its result: it is late, or a reduction itself
    for number, (task, sources) in enumerate(zip(program.tasks, program.index.sources, strict=True)):
        if task.kind != OPTIMIZER and any([comes_late[source] for source in sources]):
            late[number] = comes_late[number] = True
    return late


def _ends(program: Program) -> tuple[list[int], set[int]]:
    """Per task of the backward, the one reduction or gradient that it leads to; `MANY`, or `NONE`. And the last messages.

    What a copy joins for a message counts for each by itself, as the number of its buffer behind those of the tasks. The
    end that is furthest from where the backward starts has what leads to it as its path: that leads to `MANY`.
    """
    index, tasks = program.index, program.tasks
    ends, joins = [NONE] * len(tasks), _joins(program)
    heads: dict[int, float] = {}  # by end, the longest way to it
    ways = _ways(program)
    for number in reversed(range(len(tasks))):
        task = tasks[number]
        if task.kind == OPTIMIZER or not task.backward:
            continue
        found: set[int] = set()
        for buffer in index.outputs[number]:
            for reader in index.readers[buffer]:
                if joins[reader]:
                    heads[len(tasks) + buffer] = ways[number]
                    found.add(len(tasks) + buffer)
                elif ends[reader] != NONE:
                    found.add(ends[reader])
        if task.deferrable or "gradient" in [program.buffers[buffer].kind for buffer in index.outputs[number]]:
            ends[number] = min(found, default=number)
            heads[ends[number]] = max(ways[number], heads.get(ends[number], 0.0))
        elif found:
            ends[number] = found.pop() if len(found) == 1 else MANY
    last = max(heads, key=lambda end: (heads[end], -end), default=NONE)
    messages = {number for number, end in enumerate(ends) if end == last and tasks[number].deferrable}
    if last >= len(tasks):
        after = {ends[reader] for reader in index.readers[last - len(tasks)]}
        messages |= {number for number, end in enumerate(ends) if end in after and tasks[number].deferrable}
    return [MANY if end == last else end for end in ends], messages


def _joins(program: Program) -> list[bool]:
    """Per task, whether it is a kernel that joins several values for reductions of gradients."""
    index, tasks = program.index, program.tasks
    return [
        stream == 0 and len(inputs) > 1 and bool(readers) and all([tasks[reader].deferrable for reader in readers])
        for stream, inputs, readers in zip(index.streams, index.inputs, index.targets, strict=True)
    ]


def _ways(program: Program) -> list[float]:
    """Per task, the longest way to its end."""
    ways: list[float] = []
    for seconds, sources in zip(program.index.seconds, program.index.sources, strict=True):
        ways.append(seconds + max([ways[source] for source in sources], default=0.0))
    return ways
