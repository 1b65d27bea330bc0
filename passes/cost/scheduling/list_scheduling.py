"""Order a program's tasks by list scheduling, so that communication hides behind compute.

The scheduler runs the machine of `simulate` and issues, at each time, what a tuned runtime would:

1. A gather of parameters, or in the backward of what was kept, is issued early, in the order of use, while the bytes
   gathered ahead of their use fit the window and its link will be free before the next kernel ends: no queue builds up
   that others wait for. It is issued no later than in the given order.
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
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from passes.cost.program import Program
from passes.cost.scheduling.movable_tasks import MovableTasks, Prefetch
from passes.cost.scheduling.streams import Streams
from passes.cost.scheduling.task_queues import LOOKAHEAD, TaskQueues
from passes.cost.scheduling.window import FreeMemory, Window


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
    free = None if memory_budget is None else FreeMemory([memory_budget - nbytes for nbytes in movable.given.memory])
    window = Window(movable.program.index, window_bytes, free)
    scheduler = Scheduler(movable, window, fill=fill, held_seconds=held_seconds)
    program = movable.program.reordered(scheduler.run())
    return ListSchedule(program, range(window.taken, window.refused))


class Scheduler:
    """Issues tasks one by one, at the time of the first of the `streams`."""

    def __init__(self, movable: MovableTasks, window: Window, *, fill: bool, held_seconds: float) -> None:
        self.movable, self.tasks, self.index, self.window = movable, movable.program.tasks, movable.program.index, window
        self.streams = Streams(movable.program)
        self.clocks, self.due, self.turns = self.streams.clocks, self.streams.due, self.streams.turns
        self.issued = [False] * len(self.tasks)
        self.order: list[int] = []
        self.prefetches, self.next, self.in_prefetch = movable.prefetches, 0, movable.in_prefetch
        self.makers = [number for one in self.prefetches for number in one.tasks[:-1]]  # kernels that compute their operands
        self.firsts = [0, *accumulate(len(one.tasks) - 1 for one in self.prefetches)]  # per prefetch, its first in `makers`
        self.fillers = set(movable.slack if fill else ())
        self.held_last = movable.last_slack(held_seconds)
        self.urgent: list[int] = []  # collectives on the critical path whose operands' writers are issued
        self.reductions: tuple[deque[int], ...] = (deque(), deque(), deque())  # by stream
        self.phase: set[int] = set()
        self.queues = TaskQueues(movable, [], [], set(), self.issued)

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
        held_last = [number for number in self.held_last if number in self.phase]
        self.queues = TaskQueues(self.movable, waiting, held_last, self.fillers, self.issued)
        for number in waiting:
            if self.streams.missing[number] == 0 and self.index.streams[number]:
                self._operands_made(number)

    def _step(self) -> bool:
        """Issue what can start now, or wait until something can; return False when the phase has ended."""
        kernel = self.queues.kernel(self.due, self.clocks[0], self.window)
        kernel = self._maker() if kernel is None else kernel
        if kernel is None:
            return self._communicate(self.clocks[0]) or self._wait()
        self.window.read(kernel)
        if not self._communicate(self.clocks[0] + self.index.seconds[kernel]):
            self._issue(kernel)
        return True

    def _maker(self) -> int | None:
        """Return a kernel that computes the operand of a later gather, and can start."""
        for number in self.makers[self.firsts[self.next] : self.firsts[min(self.next + LOOKAHEAD, len(self.prefetches))]]:
            if self.due[number] <= self.clocks[0] and number in self.phase:
                return number
        return None

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
        if prefetch.tasks[-1] not in self.phase or not self._is_time(prefetch, until):
            return False
        for number in prefetch.tasks:
            if not self.issued[number]:
                self._issue(number)
        self.window.add(prefetch.tasks[-1], prefetch.nbytes)
        return True

    def _is_time(self, prefetch: Prefetch, until: float) -> bool:
        for buffer in prefetch.reads:
            if not self.issued[self.index.makers[buffer]] or self.streams.ready[buffer] > self.clocks[0]:
                return False
        waiting = self.queues.next_turn
        waiting = len(self.tasks) if waiting is None else waiting
        if prefetch.latest <= waiting:
            return True
        if not self.window.admits(prefetch.nbytes) or self.clocks[prefetch.stream] > until:
            return False
        free, ahead = self.window.free, self.window.ahead + prefetch.nbytes
        return free is None or not (self.reductions[prefetch.stream] or ahead > free.least(waiting, prefetch.latest - 1))

    def _wait(self) -> bool:
        """Advance the clock to the next time at which something can start; return False if there is none."""
        heads = [(stream, queue[0]) for stream, queue in enumerate(self.reductions) if queue]
        times = [self.due[number] for number in self.queues.fronts()]
        times += [self.turns[number] for number in (*self.urgent, *(head for _, head in heads))]
        times += [self.clocks[stream] for stream, _ in heads]
        if self.next < len(self.prefetches):
            prefetch = self.prefetches[self.next]
            times += [self.clocks[prefetch.stream], *(self.streams.ready[buffer] for buffer in prefetch.reads)]
        later = [time for time in times if self.clocks[0] < time < math.inf]
        if later:
            self.clocks[0] = min(later)
        return bool(later)

    def _issue(self, number: int) -> None:
        self.issued[number] = True
        self.order.append(number)
        self.queues.drop(number)
        self.window.read(number)
        for collective in self.streams.run(number):
            self._operands_made(collective)

    def _operands_made(self, collective: int) -> None:
        if collective in self.in_prefetch or collective not in self.phase:
            return
        if not self.tasks[collective].deferrable:
            self.urgent.append(collective)
        elif collective in self.movable.last:
            self.reductions[self.index.streams[collective]].appendleft(collective)
        else:
            self.reductions[self.index.streams[collective]].append(collective)
