"""In which order the host issues a step's tasks, so that communication hides behind compute.

What an expert's runtime does, as list scheduling on the machine of `simulate`:

1. A gather of parameters, or in the backward of what was kept, is issued early, in the order of use, as long as the
   bytes gathered ahead of their use fit the window and its link will be free before the next kernel ends: no queue
   builds up that others wait behind.
2. A reduction of gradients is issued as soon as it can start without holding up a kernel, its link permitting.
3. Any other collective is on the critical path: it is issued as soon as its operand is there.
4. Kernels keep their order, but one that would wait lets others go first: what is ready and stands at most
   `LOOKAHEAD` kernels further on.
5. With `hold`, kernels that lead to gradients alone (a weight's gradient) wait for such a gap, `HELD` of them at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from passes.cost.bucket import bucket
from passes.cost.program import OPTIMIZER, Program, Task
from passes.cost.simulate import Timeline, simulate

LOOKAHEAD = 32  # kernels; about those of a layer's half
HELD = 16  # kernels; about the weights of two layers
LATE = 4  # kernels behind reductions, which end in order but for those on another link
WINDOWS = (1, 4, 16)  # what `schedule` tries, in largest gathers
WORTH = 0.002  # part of the step that a larger window, or more memory, must save


@dataclass(frozen=True)
class Schedule:
    """A program in its best order found, and what it takes."""

    program: Program
    timeline: Timeline
    window_bytes: int  # 0: as it was given
    hold: bool
    bucket_bytes: int  # 0: no collectives joined


def schedule(program: Program, *, memory_limit: int | None = None, buckets: Sequence[int] = (0,)) -> Schedule:
    """The fastest order found that fits `memory_limit` bytes; where none fits, the smallest in memory.

    `buckets` are the sizes of buckets to try, in bytes; 0 joins nothing.
    """
    found = [_schedule(bucket(program, nbytes) if nbytes else program, nbytes, memory_limit) for nbytes in buckets]
    return min(found, key=lambda one: _key(one.timeline, memory_limit))


def _schedule(program: Program, bucket_bytes: int, memory_limit: int | None) -> Schedule:
    facts = _Facts.of(program)
    best = Schedule(program, simulate(program), 0, False, bucket_bytes)
    for hold in (False, True):
        fastest = float("inf")
        for window in _windows(program):
            tried = _ordered(facts, window, hold=hold)
            timeline = simulate(tried)
            if _is_better(timeline, best.timeline, memory_limit):
                best = Schedule(tried, timeline, window, hold, bucket_bytes)
            if timeline.step_time > (1 - WORTH) * fastest:
                break
            fastest = timeline.step_time
    return best


def prefetch(program: Program, window_bytes: int, *, hold: bool = False) -> Program:
    """`program` in the order of the module's text, or as it is where that is not faster."""
    ordered = _ordered(_Facts.of(program), window_bytes, hold=hold)
    return ordered if simulate(ordered).step_time < simulate(program).step_time else program


def _windows(program: Program) -> tuple[int, ...]:
    sizes = {buffer.name: buffer.nbytes for buffer in program.buffers}
    largest = max((sizes[name] for task in program.tasks if task.prefetchable for name in task.outputs), default=0)
    return tuple(largest * count for count in WINDOWS) if largest else (0,)


def _is_better(one: Timeline, other: Timeline, memory_limit: int | None) -> bool:
    """Whether `one` has the smaller key, and where both fit, saves enough for the memory that it takes more.

    Its memory is asked for only where it tells.
    """
    key = _key(other, memory_limit)
    if key[0] == 0.0 and one.step_time > (1 - WORTH) * other.step_time:
        return one.step_time < other.step_time and one.peak_memory <= other.peak_memory
    return _key(one, memory_limit) < key


def _key(timeline: Timeline, memory_limit: int | None) -> tuple[float, float]:
    if memory_limit is None or timeline.peak_memory <= memory_limit:
        return (0.0, timeline.step_time)
    return (float(timeline.peak_memory), timeline.step_time)


def _ordered(facts: _Facts, window_bytes: int, *, hold: bool) -> Program:
    return facts.program.reordered(_Scheduler(facts, window_bytes, hold=hold).run())


@dataclass(frozen=True)
class _Unit:
    """A gather of parameters with the kernels that make its operand."""

    tasks: tuple[int, ...]
    reads: tuple[int, ...]  # buffers that other units make
    use: int  # the first task in program order that needs it, or a later unit
    nbytes: int
    stream: int


@dataclass(frozen=True)
class _Facts:
    """What holds of a program however it is ordered. Lists are by task."""

    program: Program
    phases: tuple[list[int], ...]  # forward, backward and optimizer
    units: list[_Unit]
    missing: list[int]  # operands that tasks make
    is_late: list[bool]
    has_slack: list[bool]

    @staticmethod
    def of(program: Program) -> _Facts:
        makers = program.index.makers
        return _Facts(
            program,
            tuple(_phases(program.tasks)),
            _units(program),
            [sum([makers[b] >= 0 for b in inputs]) for inputs in program.index.inputs],
            _late(program),
            _slack(program),
        )


class _Queue:
    """Tasks in program order, some of which are issued."""

    def __init__(self, numbers: list[int], issued: list[bool]) -> None:
        self.numbers, self.issued, self.head = numbers, issued, 0

    def first(self) -> int | None:
        """The first that is not issued."""
        numbers, issued, at = self.numbers, self.issued, self.head
        while at < len(numbers) and issued[numbers[at]]:
            at += 1
        self.head = at
        return numbers[at] if at < len(numbers) else None

    def waiting(self, limit: int) -> list[int]:
        """The first `limit` that are not issued."""
        found: list[int] = []
        if self.first() is not None:
            numbers, issued = self.numbers, self.issued
            for at in range(self.head, len(numbers)):
                if not issued[numbers[at]]:
                    found.append(numbers[at])
                    if len(found) == limit:
                        break
        return found


class _Scheduler:
    """Issues tasks one by one, and keeps the clocks that `simulate` will find."""

    def __init__(self, facts: _Facts, window_bytes: int, *, hold: bool) -> None:
        program = facts.program
        self.facts, self.tasks, self.index, self.window = facts, program.tasks, program.index, window_bytes
        self.streams = program.index.streams
        self.sizes = [buffer.nbytes for buffer in program.buffers]
        self.clocks = [0.0, 0.0, 0.0]  # the first is also the time at hand
        self.ready = [0.0] * len(self.sizes)  # per buffer, when it is made
        self.turns = [0.0] * len(self.tasks)  # per task, when its operands are made, as far as their makers are issued
        self.missing = list(facts.missing)
        self.issued = [False] * len(self.tasks)
        self.order: list[int] = []
        self.ahead = 0  # bytes gathered and not read yet
        self.unread = [False] * len(self.sizes)
        self.units, self.unit = facts.units, 0
        self.in_unit = {number for unit in self.units for number in unit.tasks}
        self.is_late = facts.is_late
        self.is_held = facts.has_slack if hold else [False] * len(self.tasks)
        self.urgent: list[int] = []  # collectives whose operands' makers are issued
        self.reductions: tuple[deque[int], ...] = (deque(), deque(), deque())  # by stream
        self.late = self.held = self.path = _Queue([], self.issued)
        self.phase: set[int] = set()

    def run(self) -> list[int]:
        """All tasks in the order of issue."""
        for phase in self.facts.phases:
            self._begin(phase)
            while self._step():
                pass
            self.clocks[0] = max(self.clocks)
        assert len(self.order) == len(self.tasks), "a task waits for one behind it"
        return self.order

    def _begin(self, phase: list[int]) -> None:
        self.phase = set(phase)
        waiting = [number for number in phase if number not in self.in_unit]
        kernels = [number for number in waiting if self.streams[number] == 0]
        self.late = _Queue([n for n in kernels if self.is_late[n]], self.issued)
        self.held = _Queue([n for n in kernels if self.is_held[n] and not self.is_late[n]], self.issued)
        others = [n for n in waiting if not (self.is_late[n] or self.is_held[n] or self.tasks[n].deferrable)]
        self.path = _Queue(others, self.issued)
        for number in waiting:
            if self.missing[number] == 0:
                self._operands_made(number)

    def _step(self) -> bool:
        """Issue what can start now, or wait until something can; False when the phase has ended."""
        kernel = self._kernel()
        if kernel is None:
            return self._communicate(self.clocks[0]) or self._wait()
        self._read(kernel)
        if not self._communicate(self.clocks[0] + self.tasks[kernel].seconds):
            self._issue(kernel)
        return True

    def _kernel(self) -> int | None:
        """The kernel whose turn it is; None where each has to wait."""
        late = self._startable(self.late, LATE)
        if late is not None:
            return late
        held = self.held.waiting(HELD + 1)
        if len(held) > HELD and all([self._can_start(number) for number in held]):
            return held[0]
        kernel = self._startable(self.path, LOOKAHEAD)
        return kernel if kernel is not None else next((number for number in held if self._can_start(number)), None)

    def _startable(self, queue: _Queue, limit: int) -> int | None:
        """The first kernel that can start, of the first `limit` tasks that wait."""
        if queue.first() is None:
            return None
        numbers, issued, streams, missing, turns = queue.numbers, queue.issued, self.streams, self.missing, self.turns
        now = self.clocks[0]
        for at in range(queue.head, len(numbers)):
            number = numbers[at]
            if issued[number]:
                continue
            if streams[number] == 0 and missing[number] == 0 and turns[number] <= now:
                return number
            limit -= 1
            if not limit:
                return None
        return None

    def _can_start(self, number: int) -> bool:
        return self.streams[number] == 0 and self.missing[number] == 0 and self.turns[number] <= self.clocks[0]

    def _communicate(self, until: float) -> bool:
        """Issue collectives; those that can wait only on a link that is free before `until`."""
        count = len(self.order)
        for number in [n for n in self.urgent if self.turns[n] <= self.clocks[0]]:
            self.urgent.remove(number)
            self._issue(number)
        while self.unit < len(self.units) and self._gather(self.units[self.unit], until):
            self.unit += 1
        for stream, queue in enumerate(self.reductions):
            while queue and self.clocks[stream] <= until and self.turns[queue[0]] <= self.clocks[0]:
                self._issue(queue.popleft())
        return len(self.order) > count

    def _gather(self, unit: _Unit, until: float) -> bool:
        """Issue a gather, if it is time."""
        if unit.tasks[-1] not in self.phase or any(self.ready[buffer] > self.clocks[0] for buffer in unit.reads):
            return False
        waiting = self.path.first()
        is_due = unit.use <= (len(self.tasks) if waiting is None else waiting)
        fits = self.ahead + unit.nbytes <= self.window and self.clocks[unit.stream] <= until
        if not (is_due or fits):
            return False
        for number in unit.tasks:
            if not self.issued[number]:
                self._issue(number)
        for buffer in self.index.outputs[unit.tasks[-1]]:
            self.unread[buffer] = True
        self.ahead += unit.nbytes
        return True

    def _wait(self) -> bool:
        """Go on to the next time at which something can start; False where there is none."""
        queues = (self.late.waiting(LATE), self.held.waiting(HELD + 1), self.path.waiting(LOOKAHEAD))
        waiting = [number for queue in queues for number in queue if self.missing[number] == 0]
        heads = [(stream, queue[0]) for stream, queue in enumerate(self.reductions) if queue]
        times = [self.turns[number] for number in (*waiting, *self.urgent, *(head for _, head in heads))]
        times += [self.clocks[stream] for stream, _ in heads]
        if self.unit < len(self.units):
            unit = self.units[self.unit]
            times += [self.clocks[unit.stream], *(self.ready[buffer] for buffer in unit.reads)]
        later = [time for time in times if time > self.clocks[0]]
        if later:
            self.clocks[0] = min(later)
        return bool(later)

    def _issue(self, number: int) -> None:
        stream, clocks, turns, missing = self.streams[number], self.clocks, self.turns, self.missing
        end = clocks[stream] = max(clocks[0], clocks[stream], turns[number]) + self.tasks[number].seconds
        self.issued[number] = True
        self.order.append(number)
        self._read(number)
        for buffer in self.index.outputs[number]:
            self.ready[buffer] = end
            for reader in self.index.readers[buffer]:
                missing[reader] -= 1
                if end > turns[reader]:
                    turns[reader] = end
                if missing[reader] == 0:
                    self._operands_made(reader)

    def _read(self, number: int) -> None:
        """Count what a task reads as no longer gathered ahead."""
        if not self.ahead:
            return
        for buffer in self.index.inputs[number]:
            if self.unread[buffer]:
                self.unread[buffer] = False
                self.ahead -= self.sizes[buffer]

    def _operands_made(self, number: int) -> None:
        if self.streams[number] == 0 or number in self.in_unit or number not in self.phase:
            return
        waiting = self.reductions[self.streams[number]] if self.tasks[number].deferrable else self.urgent
        waiting.append(number)


def _phases(tasks: tuple[Task, ...]) -> Iterator[list[int]]:
    """Forward, backward and optimizer."""
    updates = {number for number, task in enumerate(tasks) if task.kind == OPTIMIZER}
    for backward in (False, True):
        yield [n for n, task in enumerate(tasks) if task.backward is backward and n not in updates]
    yield sorted(updates)


def _units(program: Program) -> list[_Unit]:
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
        units.append(_Unit((*kernels, number), tuple(reads), use, nbytes, index.streams[number]))
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


def _slack(program: Program) -> list[bool]:
    """Per task, whether nothing but gradients and the optimizer waits for it."""
    index, tasks = program.index, program.tasks
    slack = [False] * len(tasks)
    for number in reversed(range(len(tasks))):
        readers = [reader for buffer in index.outputs[number] for reader in index.readers[buffer]]
        ends = all(slack[r] or tasks[r].deferrable or tasks[r].kind == OPTIMIZER for r in readers)
        slack[number] = ends and bool(readers) and not tasks[number].is_collective and tasks[number].backward
    return slack
