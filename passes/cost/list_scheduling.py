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

import math
import sys
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from passes.cost.movable_tasks import Facts, Unit
from passes.cost.program import Program

LOOKAHEAD = 32  # kernels; about those of a layer's half
HELD = 16  # kernels; about the weights of two layers
LATE = 4  # kernels behind reductions, which end in order but for those on another link


@dataclass(frozen=True)
class Ordered:
    """A program in the order of the module's text. All `windows`, in bytes, give this one."""

    program: Program
    windows: range


def ordered(facts: Facts, window_bytes: int, *, fill: bool, held_seconds: float, room: int | None = None) -> Ordered:
    """The program of `facts` with at most `window_bytes` gathered ahead of their use, and, with `room`, none that brings
    memory above so many bytes."""
    scheduler = _Scheduler(facts, window_bytes, fill=fill, held_seconds=held_seconds)
    if room is not None:
        scheduler.room = Room([room - nbytes for nbytes in facts.given.memory])
    program = facts.program.reordered(scheduler.run())
    return Ordered(program, range(scheduler.taken, scheduler.refused))


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
    """Tasks that wait for their turn, and the first of them in `front`, as many as can start out of turn."""

    def __init__(self, numbers: list[int], reach: int, issued: list[bool]) -> None:
        self.numbers, self.reach, self.issued = numbers, reach, issued
        self.front, self.next = numbers[:reach], reach

    def drop(self, number: int) -> None:
        """A task that was issued; others behind the front may have been before."""
        if number not in self.front:
            return
        self.front.remove(number)
        while len(self.front) < self.reach and self.next < len(self.numbers):
            if not self.issued[self.numbers[self.next]]:
                self.front.append(self.numbers[self.next])
            self.next += 1


class _Scheduler:
    """Issues tasks one by one, and keeps the clocks that `simulate` will find."""

    def __init__(self, facts: Facts, window_bytes: int, *, fill: bool, held_seconds: float) -> None:
        program = facts.program
        self.facts, self.tasks, self.index, self.window = facts, program.tasks, program.index, window_bytes
        self.taken, self.refused = 0, sys.maxsize  # bytes ahead: the most that the window let in, the least that it did not
        self.streams, self.seconds, self.sizes = program.index.streams, program.index.seconds, program.index.sizes
        self.contention, self.is_contended = program.contention, bool(program.contention)
        self.pending: list[int] = []  # collectives that a kernel may still run beside, where kernels slow them down
        self.clocks = [0.0, 0.0, 0.0]  # the first is also the time at hand
        self.ready = [0.0] * len(self.sizes)  # per buffer, when it is made
        self.turns = [0.0] * len(self.tasks)  # per task, when its operands are made, as far as their makers are issued
        self.missing = list(facts.missing)
        self.due = [math.inf if stream or facts.missing[n] else 0.0 for n, stream in enumerate(self.streams)]
        self.issued = [False] * len(self.tasks)
        self.order: list[int] = []
        self.ahead = 0  # bytes gathered and not read yet
        self.unread = [False] * len(self.sizes)
        self.units, self.unit, self.in_unit = facts.units, 0, facts.in_unit
        self.makers = [number for unit in self.units for number in unit.tasks[:-1]]  # of the units' operands
        self.firsts = [0, *accumulate(len(unit.tasks) - 1 for unit in self.units)]  # per unit, in them
        self.room: Room | None = None
        self.is_late = facts.is_late
        self.fillers = set(facts.slack if fill else ())
        self.held_last = facts.last_slack(held_seconds)
        self.urgent: list[int] = []  # collectives whose operands' makers are issued
        self.reductions: tuple[deque[int], ...] = (deque(), deque(), deque())  # by stream
        self.late = self.held = self.path = self.last = _Queue([], 0, self.issued)
        self.queues: dict[int, _Queue] = {}  # by task
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
        last = [n for n in self.held_last if n in self.phase]
        fillers = self.fillers.difference(last)
        held = [n for n in kernels if n in fillers]
        apart = {*last, *held}
        others = [n for n in waiting if not (self.is_late[n] or n in apart or self.tasks[n].deferrable)]
        self.late = _Queue([n for n in kernels if self.is_late[n]], LATE, self.issued)
        self.held = _Queue(held, HELD + 1, self.issued)
        self.path = _Queue(others, LOOKAHEAD, self.issued)
        self.last = _Queue(last, len(last), self.issued)  # in no order of the program: each may start
        self.queues = {n: queue for queue in (self.late, self.held, self.path, self.last) for n in queue.numbers}
        for number in waiting:
            if self.missing[number] == 0:
                self._operands_made(number)

    def _step(self) -> bool:
        """Issue what can start now, or wait until something can; False when the phase has ended."""
        kernel = self._kernel()
        if kernel is None:
            return self._communicate(self.clocks[0]) or self._wait()
        self._read(kernel)
        if not self._communicate(self.clocks[0] + self.seconds[kernel]):
            self._issue(kernel)
        return True

    def _kernel(self) -> int | None:
        """The kernel whose turn it is; None where each has to wait."""
        now, due = self.clocks[0], self.due
        for number in self.late.front:
            if due[number] <= now:
                return number
        held = self.held.front
        if len(held) > HELD and all([due[number] <= now for number in held]):
            return held[0]
        for number in self.path.front:
            if due[number] <= now and (self.room is None or self._has_room(self.room, number)):
                return number
        for number in (*held, *self.last.front):
            if due[number] <= now:
                return number
        # What makes the operand of a later gather:
        for number in self.makers[self.firsts[self.unit] : self.firsts[min(self.unit + LOOKAHEAD, len(self.units))]]:
            if due[number] <= now and number in self.phase:
                return number
        return None

    def _has_room(self, room: Room, number: int) -> bool:
        """Whether there is memory for what a kernel of the path makes from now on, and not from its own turn on."""
        waiting = self.path.front[0]
        if number == waiting:
            return True
        made = sum([self.sizes[buffer] for buffer in self.index.outputs[number]])
        return self.ahead + made <= room.least(waiting, number - 1)

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
        if unit.tasks[-1] not in self.phase:
            return False
        for buffer in unit.reads:
            if self.ready[buffer] > self.clocks[0]:
                return False
        waiting = self.path.front[0] if self.path.front else len(self.tasks)
        if unit.use > waiting:
            ahead = self.ahead + unit.nbytes
            if ahead > self.window:
                self.refused = min(self.refused, ahead)
                return False
            self.taken = max(self.taken, ahead)
            if self.clocks[unit.stream] > until:
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
        fronts = (self.late.front, self.held.front, self.path.front, self.last.front)
        heads = [(stream, queue[0]) for stream, queue in enumerate(self.reductions) if queue]
        times = [self.due[number] for front in fronts for number in front]
        times += [self.turns[number] for number in (*self.urgent, *(head for _, head in heads))]
        times += [self.clocks[stream] for stream, _ in heads]
        if self.unit < len(self.units):
            unit = self.units[self.unit]
            times += [self.clocks[unit.stream], *(self.ready[buffer] for buffer in unit.reads)]
        later = [time for time in times if self.clocks[0] < time < math.inf]
        if later:
            self.clocks[0] = min(later)
        return bool(later)

    def _issue(self, number: int) -> None:
        stream, clocks, turns, missing = self.streams[number], self.clocks, self.turns, self.missing
        held = self.index.holds[number]
        start, seconds = max(clocks[0], clocks[stream or held], turns[number]), self.seconds[number]
        end = start + seconds
        if stream:
            if self.contention.links:
                self.pending.append(number)
        elif self.is_contended and not held:
            end = self.contention.kernel_end(start, seconds, max(clocks[1], clocks[2]))
            if self.contention.links:
                self._slow_links(start, end)
        clocks[stream] = end
        if held:
            clocks[held] = end
        self.issued[number], self.due[number] = True, math.inf
        self.order.append(number)
        if number in self.queues:
            self.queues[number].drop(number)
        self._read(number)
        for buffer in self.index.outputs[number]:
            self.ready[buffer] = end
        for reader in self.index.targets[number]:
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
                ready = self.ready[buffer] = self.contention.link_time(self.ready[buffer], start, end)
                for reader in self.index.readers[buffer]:
                    self.turns[reader] = max(self.turns[reader], ready)
                    if self.due[reader] < math.inf:
                        self.due[reader] = self.turns[reader]
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
        if self.streams[number] == 0:
            self.due[number] = self.turns[number]
            return
        if number in self.in_unit or number not in self.phase:
            return
        if not self.tasks[number].deferrable:
            self.urgent.append(number)
        elif number in self.facts.last:
            self.reductions[self.streams[number]].appendleft(number)
        else:
            self.reductions[self.streams[number]].append(number)
