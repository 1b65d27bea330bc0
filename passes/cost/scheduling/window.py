"""Limit the bytes that are gathered ahead of their use: by a window, and by the memory that is free."""

from __future__ import annotations

import sys

from passes.cost.program import Index


class Window:
    """Count the bytes that are gathered and not read yet."""

    def __init__(self, index: Index, nbytes: int, free: FreeMemory | None) -> None:
        self.index, self.nbytes, self.free = index, nbytes, free
        self.taken, self.refused = 0, sys.maxsize  # bytes ahead: the most that the window allowed, the least that it did not
        self.ahead = 0
        self.unread = [False] * len(index.sizes)  # per buffer

    def admits(self, nbytes: int) -> bool:
        """Return whether the window allows `nbytes` more."""
        ahead = self.ahead + nbytes
        if ahead > self.nbytes:
            self.refused = min(self.refused, ahead)
            return False
        self.taken = max(self.taken, ahead)
        return True

    def add(self, number: int, nbytes: int) -> None:
        """Count the results of a gather."""
        for buffer in self.index.outputs[number]:
            self.unread[buffer] = True
        self.ahead += nbytes

    def read(self, number: int) -> None:
        """Stop counting the inputs of a task."""
        if not self.ahead:
            return
        for buffer in self.index.inputs[number]:
            if self.unread[buffer]:
                self.unread[buffer] = False
                self.ahead -= self.index.sizes[buffer]

    def fits(self, number: int, waiting: int) -> bool:
        """Return whether there is memory for a kernel's results from the turn of the `waiting` task on, instead of from its
        own turn on."""
        if self.free is None or number == waiting:
            return True
        made = sum([self.index.sizes[buffer] for buffer in self.index.outputs[number]])
        return self.ahead + made <= self.free.least(waiting, number - 1)


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
