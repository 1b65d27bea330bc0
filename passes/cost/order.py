"""In which order the host issues a program's tasks, so that communication hides behind compute.

What an expert's runtime does, as list scheduling on the machine of `simulate`:

1. A gather of parameters, or in the backward of what was kept, is issued early, in the order of use, as long as the
   bytes gathered ahead of their use fit the window, and its link will be free before the next kernel ends: no queue
   builds up that others wait behind.
2. A reduction of gradients is issued as soon as it can start without holding up a kernel, its link permitting.
3. Any other collective is on the critical path: it is issued as soon as its operand is there.
4. Kernels keep their order, but one that would wait lets others go first: what is ready and stands at most
   `LOOKAHEAD` kernels further on, or what makes the operands of the next `LOOKAHEAD` gathers.
5. What leads to one gradient alone (a weight's) can wait: with `fill`, for such a gap, `HELD` kernels at most; and the
   last `held_seconds` of the backward for all the rest to be issued, so that the reduction that ends last has kernels
   beside it. Those whose reductions take longest go first then.
6. Where memory is short, what is gathered ahead, or made by a kernel that goes ahead, has to fit into what is free until
   its turn; and a gather that has time lets the reductions go that wait for its link, which hold what they read.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from passes.cost.movable import Facts, Unit
from passes.cost.program import Program

LOOKAHEAD = 32  # kernels; about those of a layer's half
HELD = 16  # kernels; about the weights of two layers
LATE = 4  # kernels behind reductions, which end in order but for those on another link


def ordered(facts: Facts, window_bytes: int, *, fill: bool, held_seconds: float, room: int | None = None) -> Program:
    """The program of `facts` in the order of the module's text: at most `window_bytes` gathered ahead of their use, and,
    with `room`, none that brings memory above so many bytes."""
    scheduler = _Scheduler(facts, window_bytes, fill=fill, held_seconds=held_seconds)
    if room is not None:
        scheduler.room = Room([room - nbytes for nbytes in facts.given.memory])
    return facts.program.reordered(scheduler.run())


class Room:
    """Bytes left at each turn of a program as it is given."""

    def __init__(self, free: list[int]) -> None:
        self.tables = [free]  # of twice as many turns each
        while (reach := 1 << (len(self.tables) - 1)) < len(free):
            last = self.tables[-1]
            self.tables.append([min(pair) for pair in zip(last, last[reach:], strict=False)])

    def least(self, first: int, last: int) -> int:
        """Of the turns from `first` to `last`."""
        level = (last - first + 1).bit_length() - 1
        table = self.tables[level]
        return min(table[first], table[last + 1 - (1 << level)])


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

    def __init__(self, facts: Facts, window_bytes: int, *, fill: bool, held_seconds: float) -> None:
        program = facts.program
        self.facts, self.tasks, self.index, self.window = facts, program.tasks, program.index, window_bytes
        self.streams = program.index.streams
        self.contention = program.contention
        self.pending: list[int] = []  # collectives that a kernel may still run beside, where kernels slow them down
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
        self.makers = [number for unit in self.units for number in unit.tasks[:-1]]  # of the units' operands
        self.firsts = [0, *accumulate(len(unit.tasks) - 1 for unit in self.units)]  # per unit, in them
        self.room: Room | None = None
        self.is_late = facts.is_late
        self.fillers = set(facts.slack if fill else ())
        self.held_last = facts.last_slack(held_seconds)
        self.urgent: list[int] = []  # collectives whose operands' makers are issued
        self.reductions: tuple[deque[int], ...] = (deque(), deque(), deque())  # by stream
        self.late = self.held = self.path = self.last = _Queue([], self.issued)
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
        last = [n for n in self.held_last if n in self.phase]
        self.last = _Queue(last, self.issued)  # not in the order of the program: what others read may stand far behind them
        fillers = self.fillers.difference(last)
        held = [n for n in kernels if n in fillers]
        self.held = _Queue(held, self.issued)
        apart = {*last, *held}
        others = [n for n in waiting if not (self.is_late[n] or n in apart or self.tasks[n].deferrable)]
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
        held = self._held_too_long() if self.held.numbers else None
        if held is not None:
            return held
        kernel = self._startable(self.path, LOOKAHEAD)
        if kernel is None:
            kernel = self._startable(self.held, HELD + 1)
        if kernel is None:
            kernel = self._startable(self.last, len(self.tasks))
        return self._ahead() if kernel is None else kernel

    def _held_too_long(self) -> int | None:
        """The first kernel that is held, where more than `HELD` are and can start."""
        first, numbers, waiting = self.held.first(), self.held.numbers, 0
        for at in range(self.held.head, len(numbers)):
            if not self.issued[numbers[at]]:
                if not self._can_start(numbers[at]):
                    return None
                waiting += 1
                if waiting > HELD:
                    return first
        return None

    def _ahead(self) -> int | None:
        """A kernel that makes the operand of a later gather."""
        for number in self.makers[self.firsts[self.unit] : self.firsts[min(self.unit + LOOKAHEAD, len(self.units))]]:
            if not self.issued[number] and number in self.phase and self._can_start(number):
                return number
        return None

    def _startable(self, queue: _Queue, limit: int) -> int | None:
        """The first kernel that can start, of the first `limit` tasks that wait."""
        if not queue.numbers or queue.first() is None:
            return None
        numbers, issued, streams, missing, turns = queue.numbers, queue.issued, self.streams, self.missing, self.turns
        now = self.clocks[0]
        for at in range(queue.head, len(numbers)):
            number = numbers[at]
            if issued[number]:
                continue
            can_start = streams[number] == 0 and missing[number] == 0 and turns[number] <= now
            if can_start and (queue is not self.path or self._has_room(number)):
                return number
            limit -= 1
            if not limit:
                return None
        return None

    def _has_room(self, number: int) -> bool:
        """Whether there is memory for what a kernel of the path makes from now on, and not from its own turn on."""
        waiting = self.path.first()
        if self.room is None or waiting is None or number == waiting:
            return True
        made = sum([self.sizes[buffer] for buffer in self.index.outputs[number]])
        return self.ahead + made <= self.room.least(waiting, number - 1)

    def _can_start(self, number: int) -> bool:
        return self.streams[number] == 0 and self.missing[number] == 0 and self.turns[number] <= self.clocks[0]

    def _communicate(self, until: float) -> bool:
        """Issue collectives; those that can wait only on a link that is free before `until`."""
        count = len(self.order)
        for number in [n for n in self.urgent if self.turns[n] <= self.clocks[0]] if self.urgent else ():
            self.urgent.remove(number)
            self._issue(number)
        while self.unit < len(self.units) and self._gather(self.units[self.unit], until):
            self.unit += 1
        for stream, queue in enumerate(self.reductions):
            while queue and self.clocks[stream] <= until and self.turns[queue[0]] <= self.clocks[0]:
                self._issue(queue.popleft())
        return len(self.order) > count

    def _gather(self, unit: Unit, until: float) -> bool:
        """Issue a gather, if it is time."""
        if unit.tasks[-1] not in self.phase or any(self.ready[buffer] > self.clocks[0] for buffer in unit.reads):
            return False
        waiting = self.path.first()
        is_due = unit.use <= (len(self.tasks) if waiting is None else waiting)
        if not is_due:
            assert waiting is not None
            ahead = self.ahead + unit.nbytes
            if ahead > self.window or self.clocks[unit.stream] > until:
                return False
            if self.room is not None and (self.reductions[unit.stream] or ahead > self.room.least(waiting, unit.use - 1)):
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
        queues = (
            self.late.waiting(LATE),
            self.held.waiting(HELD + 1),
            self.path.waiting(LOOKAHEAD),
            self.last.waiting(len(self.tasks)),
        )
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
        held = self.index.holds[number]
        start, seconds = max(clocks[0], clocks[stream or held], turns[number]), self.tasks[number].seconds
        end = start + seconds
        if stream:
            if self.contention.links:
                self.pending.append(number)
        elif self.contention and not held:
            end = self.contention.kernel_end(start, seconds, max(clocks[1], clocks[2]))
            if self.contention.links:
                self._slow_links(start, end)
        clocks[stream] = end
        if held:
            clocks[held] = end
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

    def _slow_links(self, start: float, end: float) -> None:
        """Of a kernel beside them."""
        for link in (1, 2):
            self.clocks[link] = self.contention.link_time(self.clocks[link], start, end)
        for number in self.pending:
            for buffer in self.index.outputs[number]:
                self.ready[buffer] = self.contention.link_time(self.ready[buffer], start, end)
                for reader in self.index.readers[buffer]:
                    self.turns[reader] = max(self.turns[reader], self.ready[buffer])
        self.pending = [n for n in self.pending if any(self.ready[b] > end for b in self.index.outputs[n])]

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
        if not self.tasks[number].deferrable:
            self.urgent.append(number)
        elif number in self.facts.last:
            self.reductions[self.streams[number]].appendleft(number)
        else:
            self.reductions[self.streams[number]].append(number)
