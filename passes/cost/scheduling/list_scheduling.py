"""Order a program's tasks by list scheduling, so that communication hides behind compute.

The scheduler runs the machine of `simulate` and issues, at each time, what a tuned runtime would:

1. A gather of parameters, or in the backward of what was kept, is issued early, in the order of use, while the bytes
   gathered ahead of their use fit the window and its link will be free before the next kernel ends: no queue builds up
   that others wait for.
2. A reduction of gradients is issued as soon as it can start without delaying a kernel and its link is free.
3. Any other collective is on the critical path: it is issued as soon as its operand is computed.
4. Kernels keep their order, but one that would wait lets others run first: a ready kernel at most `LOOKAHEAD` kernels
   further on, or the kernels that compute the operands of the next `LOOKAHEAD` gathers.
5. Kernels that lead to one gradient alone (a weight's) can wait: with `fill`, at most `HELD` of them wait for a time at
   which no other kernel can run; and those that take the last `held_seconds` of the backward wait until all others are
   issued, so that the last reduction overlaps with kernels. Of these, those with the longest reductions run first.
6. With a memory budget, what is gathered ahead, or computed by a kernel that runs ahead, has to fit into the free memory
   up to its own turn; and a gather that has time lets reductions go first that wait for its link, since they hold their
   operands.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from passes.cost.program import Program
from passes.cost.scheduling.movable_tasks import MovableTasks, Prefetch

# Heuristics: `python -m benchmarks.overlap` shows, for each case, what the order exposes and the lower bound of any order.
LOOKAHEAD = 32  # kernels: about those of half a transformer layer; more take longer to search and keep more in memory
HELD = 16  # kernels: about the weight gradients of two layers, each of which keeps its operands in memory
LATE = 4  # kernels that read reductions: these end in order, except on the other link, so few can be ready early


@dataclass(frozen=True)
class ListSchedule:
    """A program in the order that list scheduling gives it. All `windows`, in bytes, give the same order."""

    program: Program
    windows: range


def list_schedule(
    movable: MovableTasks, window_bytes: int, *, fill: bool, held_seconds: float, memory_budget: int | None = None
) -> ListSchedule:
    """Return the program with at most `window_bytes` gathered ahead of their use.

    With `memory_budget`, nothing that runs ahead raises memory above that many bytes.
    """
    scheduler = _Scheduler(movable, window_bytes, fill=fill, held_seconds=held_seconds)
    if memory_budget is not None:
        scheduler.free = FreeMemory([memory_budget - nbytes for nbytes in movable.given.memory])
    program = movable.program.reordered(scheduler.run())
    return ListSchedule(program, range(scheduler.taken, scheduler.refused))


class FreeMemory:
    """The bytes that are free at each turn of a program in its own order, as a sparse table for range minima."""

    def __init__(self, free: list[int]) -> None:
        self.tables = [free]  # minima over 1, 2, 4, ... turns
        while (reach := 1 << (len(self.tables) - 1)) < len(free):
            last = self.tables[-1]
            self.tables.append([min(pair) for pair in zip(last, last[reach:], strict=False)])

    def least(self, first: int, last: int) -> int:
        """Return the fewest free bytes at the turns from `first` to `last`."""
        level = (last - first + 1).bit_length() - 1
        table = self.tables[level]
        return min(table[first], table[last + 1 - (1 << level)])


class _Queue:
    """Tasks that wait for their turn; the first `reach` of them, `front`, can start out of turn."""

    def __init__(self, numbers: list[int], reach: int, issued: list[bool]) -> None:
        self.numbers, self.reach, self.issued = numbers, reach, issued
        self.front, self.next = numbers[:reach], reach

    def drop(self, number: int) -> None:
        """Remove a task that was issued, and fill the front with the next ones that are not issued."""
        if number not in self.front:
            return
        self.front.remove(number)
        while len(self.front) < self.reach and self.next < len(self.numbers):
            if not self.issued[self.numbers[self.next]]:
                self.front.append(self.numbers[self.next])
            self.next += 1


class _Scheduler:
    """Issues tasks one by one, with the clocks that `simulate` will compute for this order."""

    def __init__(self, movable: MovableTasks, window_bytes: int, *, fill: bool, held_seconds: float) -> None:
        program = movable.program
        self.movable, self.tasks, self.index, self.window = movable, program.tasks, program.index, window_bytes
        self.taken, self.refused = 0, sys.maxsize  # bytes ahead: the most that the window allowed, the least that it did not
        self.streams, self.seconds, self.sizes = program.index.streams, program.index.seconds, program.index.sizes
        self.contention, self.is_contended = program.contention, bool(program.contention)
        self.pending: list[int] = []  # collectives that a later kernel may overlap and slow down
        self.clocks = [0.0, 0.0, 0.0]  # per stream, when it is free; the first is also the current time
        self.ready = [0.0] * len(self.sizes)  # per buffer, when it is written
        self.turns = [0.0] * len(self.tasks)  # per task, when its operands are written, as far as their writers are issued
        self.missing = list(movable.missing)
        self.due = [math.inf if stream or movable.missing[n] else 0.0 for n, stream in enumerate(self.streams)]
        self.issued = [False] * len(self.tasks)
        self.order: list[int] = []
        self.ahead = 0  # bytes gathered and not read yet
        self.unread = [False] * len(self.sizes)
        self.prefetches, self.next, self.in_prefetch = movable.prefetches, 0, movable.in_prefetch
        self.makers = [number for one in self.prefetches for number in one.tasks[:-1]]  # kernels that compute their operands
        self.firsts = [0, *accumulate(len(one.tasks) - 1 for one in self.prefetches)]  # per prefetch, its first in `makers`
        self.free: FreeMemory | None = None
        self.is_late = movable.is_late
        self.fillers = set(movable.slack if fill else ())
        self.held_last = movable.last_slack(held_seconds)
        self.urgent: list[int] = []  # collectives on the critical path whose operands' writers are issued
        self.reductions: tuple[deque[int], ...] = (deque(), deque(), deque())  # by stream
        self.late = self.held = self.path = self.last = _Queue([], 0, self.issued)
        self.queues: dict[int, _Queue] = {}  # by task
        self.phase: set[int] = set()

    def run(self) -> list[int]:
        """Return the numbers of all tasks in the order of issue."""
        for phase in self.movable.phases:
            self._begin(phase)
            while self._step():
                pass
            self.clocks[0] = max(self.clocks)
        assert len(self.order) == len(self.tasks), "a task waits for a later one"
        return self.order

    def _begin(self, phase: list[int]) -> None:
        self.phase = set(phase)
        waiting = [number for number in phase if number not in self.in_prefetch]
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
        """Issue what can start now, or wait until something can; return False when the phase has ended."""
        kernel = self._kernel()
        if kernel is None:
            return self._communicate(self.clocks[0]) or self._wait()
        self._read(kernel)
        if not self._communicate(self.clocks[0] + self.seconds[kernel]):
            self._issue(kernel)
        return True

    def _kernel(self) -> int | None:
        """Return the kernel whose turn it is; None if each has to wait."""
        now, due = self.clocks[0], self.due
        for number in self.late.front:
            if due[number] <= now:
                return number
        held = self.held.front
        if len(held) > HELD and all([due[number] <= now for number in held]):
            return held[0]
        for number in self.path.front:
            if due[number] <= now and (self.free is None or self._fits(self.free, number)):
                return number
        for number in (*held, *self.last.front):
            if due[number] <= now:
                return number
        # Kernels that compute the operand of a later gather:
        for number in self.makers[self.firsts[self.next] : self.firsts[min(self.next + LOOKAHEAD, len(self.prefetches))]]:
            if due[number] <= now and number in self.phase:
                return number
        return None

    def _fits(self, free: FreeMemory, number: int) -> bool:
        """Return whether there is memory for a kernel's results from now on, instead of from its own turn on."""
        waiting = self.path.front[0]
        if number == waiting:
            return True
        made = sum([self.sizes[buffer] for buffer in self.index.outputs[number]])
        return self.ahead + made <= free.least(waiting, number - 1)

    def _communicate(self, until: float) -> bool:
        """Issue collectives; those that can wait only if their link is free before `until`. Return whether any was issued."""
        count = len(self.order)
        for number in [n for n in self.urgent if self.turns[n] <= self.clocks[0]] if self.urgent else ():
            self.urgent.remove(number)
            self._issue(number)
        while self.next < len(self.prefetches) and self._gather(self.prefetches[self.next], until):
            self.next += 1
        for stream, queue in enumerate(self.reductions):
            while queue and self.clocks[stream] <= until and self.turns[queue[0]] <= self.clocks[0]:
                self._issue(queue.popleft())
        return len(self.order) > count

    def _gather(self, prefetch: Prefetch, until: float) -> bool:
        """Issue a gather and the kernels before it, if it is time; return whether it was issued."""
        if prefetch.tasks[-1] not in self.phase:
            return False
        for buffer in prefetch.reads:
            if self.ready[buffer] > self.clocks[0]:
                return False
        waiting = self.path.front[0] if self.path.front else len(self.tasks)
        if prefetch.use > waiting:
            ahead = self.ahead + prefetch.nbytes
            if ahead > self.window:
                self.refused = min(self.refused, ahead)
                return False
            self.taken = max(self.taken, ahead)
            if self.clocks[prefetch.stream] > until:
                return False
            if self.free is not None and (self.reductions[prefetch.stream] or ahead > self.free.least(waiting, prefetch.use - 1)):
                return False
        for number in prefetch.tasks:
            if not self.issued[number]:
                self._issue(number)
        for buffer in self.index.outputs[prefetch.tasks[-1]]:
            self.unread[buffer] = True
        self.ahead += prefetch.nbytes
        return True

    def _wait(self) -> bool:
        """Advance the clock to the next time at which something can start; return False if there is none."""
        fronts = (self.late.front, self.held.front, self.path.front, self.last.front)
        heads = [(stream, queue[0]) for stream, queue in enumerate(self.reductions) if queue]
        times = [self.due[number] for front in fronts for number in front]
        times += [self.turns[number] for number in (*self.urgent, *(head for _, head in heads))]
        times += [self.clocks[stream] for stream, _ in heads]
        if self.next < len(self.prefetches):
            prefetch = self.prefetches[self.next]
            times += [self.clocks[prefetch.stream], *(self.ready[buffer] for buffer in prefetch.reads)]
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
        """Delay the links and their pending collectives by a kernel that overlaps them."""
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
        """Stop counting the inputs of a task as gathered ahead."""
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
        if number in self.in_prefetch or number not in self.phase:
            return
        if not self.tasks[number].deferrable:
            self.urgent.append(number)
        elif number in self.movable.last:
            self.reductions[self.streams[number]].appendleft(number)
        else:
            self.reductions[self.streams[number]].append(number)
