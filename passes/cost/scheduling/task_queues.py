"""Queue the tasks of a phase in program order, and choose the kernel whose turn it is."""

from __future__ import annotations

from passes.cost.scheduling.movable_tasks import MovableTasks
from passes.cost.scheduling.window import Window

# Heuristics: `python -m benchmarks.overlap` shows, for each case, what the order exposes and the lower bound of any order.
LOOKAHEAD = 32  # kernels: about those of half a transformer layer; more take longer to search and keep more in memory
HELD = 16  # kernels: about the weight gradients of two layers, each of which keeps its operands in memory
LATE = 4  # kernels that read reductions: these end in order, except on the other link, so few can be ready early


class TaskQueues:
    """The tasks of a phase that are not issued, but gathers of parameters and reductions of gradients."""

    def __init__(
        self, movable: MovableTasks, waiting: list[int], held_last: list[int], fillers: set[int], issued: list[bool]
    ) -> None:
        """Queue the `waiting` tasks; kernels of `held_last` run last, `fillers` when no other can."""
        is_late, streams = movable.is_late, movable.program.index.streams
        fillers = fillers.difference(held_last)
        kernels = [n for n in waiting if streams[n] == 0]
        held = [n for n in kernels if n in fillers]
        apart = {*held_last, *held}
        others = [n for n in waiting if not (is_late[n] or n in apart or movable.program.tasks[n].deferrable)]
        self.late = _Queue([n for n in kernels if is_late[n]], LATE, issued)
        self.held = _Queue(held, HELD + 1, issued)
        self.path = _Queue(others, LOOKAHEAD, issued)
        self.last = _Queue(held_last, len(held_last), issued)  # in no order of the program: each may start
        self.by_task = {n: queue for queue in (self.late, self.held, self.path, self.last) for n in queue.numbers}

    @property
    def next_turn(self) -> int | None:
        """Return the first task in program order that is neither late nor held; None if there is none."""
        return self.path.front[0] if self.path.front else None

    def kernel(self, due: list[float], now: float, window: Window) -> int | None:
        """Return the kernel whose turn it is; None if each has to wait."""
        for number in self.late.front:
            if due[number] <= now:
                return number
        held = self.held.front
        if len(held) > HELD and all([due[number] <= now for number in held]):
            return held[0]
        path = self.path.front
        for number in path:
            if due[number] <= now and (window.free is None or window.fits(number, path[0])):
                return number
        for number in (*held, *self.last.front):
            if due[number] <= now:
                return number
        return None

    def fronts(self) -> list[int]:
        """Return the tasks that may start out of turn."""
        return [*self.late.front, *self.held.front, *self.path.front, *self.last.front]

    def drop(self, number: int) -> None:
        """Remove a task that was issued."""
        if number in self.by_task:
            self.by_task[number].drop(number)


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
