"""Run tasks as they are issued one by one, with the clocks that `simulate` will compute for their order."""

from __future__ import annotations

import math

from passes.cost.program import Program


class Streams:
    """The clocks of the streams, and when each buffer is written and each task can start. Seconds."""

    def __init__(self, program: Program) -> None:
        self.index, self.contention = program.index, program.contention
        self.is_contended = bool(program.contention)
        self.clocks = [0.0, 0.0, 0.0]  # per stream, when it is free; the first is also the current time
        self.ready = [0.0] * len(self.index.sizes)  # per buffer, when it is written
        self.turns = [0.0] * len(program.tasks)  # per task, when its operands are written, as far as their writers are issued
        self.missing = [len(sources) for sources in self.index.sources]  # per task, operands whose writers are not issued
        streams = enumerate(self.index.streams)
        # Per task, when it can start: only of kernels whose operands' writers are issued and that are not.
        self.due = [math.inf if stream or self.missing[number] else 0.0 for number, stream in streams]
        self.pending: list[int] = []  # collectives that a later kernel may overlap and slow down

    def run(self, number: int) -> list[int]:
        """Run a task after those before; return the collectives of whose operands it writes the last."""
        index, clocks, turns, missing = self.index, self.clocks, self.turns, self.missing
        stream, held = index.streams[number], index.holds[number]
        start, seconds = max(clocks[0], clocks[stream or held], turns[number]), index.seconds[number]
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
        self.due[number] = math.inf
        for buffer in index.outputs[number]:
            self.ready[buffer] = end
        collectives = []
        for reader in index.targets[number]:
            missing[reader] -= 1
            if end > turns[reader]:
                turns[reader] = end
            if missing[reader] == 0:
                if index.streams[reader]:
                    collectives.append(reader)
                else:
                    self.due[reader] = turns[reader]
        return collectives

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
