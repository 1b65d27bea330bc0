"""Simulate a program on a machine model: one compute stream, one stream per link, memory.

The model is that of CUDA streams, NCCL, and a host that runs ahead of the device:

1. The host issues tasks in the program's order, and never waits.
2. Kernels run one at a time, in the order of issue. One that reads a collective's result waits for it.
3. Collectives of one link run one at a time, in the order of issue; the links are independent of each other. A kernel
   that sends takes its turn on its link as well.
4. A collective starts when all kernels issued before it have ended: NCCL records an event on the compute stream at
   issue. A collective that reads another's result makes the compute stream wait for it, as `wait_tensor` does.
5. The forward, the backward and the optimizer are separate calls: each starts when the one before has ended,
   including its collectives.
6. Memory is allocated and freed in the order of issue, as an allocator with one pool per stream does. A kernel's
   results are live from its own turn, a collective's from its issue; a value is freed after the last kernel that reads
   it. What a collective reads or writes stays live until the first kernel that starts after the collective has ended:
   waiting there costs nothing.
7. A kernel is slower while a link is in use, and a collective while a kernel runs, by the hardware's `contention` and
   `link_contention` (`passes/cost/contention.py`). A kernel that sends neither is slowed down nor slows others down.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from passes.cost.contention import Contention
from passes.cost.liveness import bytes_by_kind, bytes_by_turn, lives
from passes.cost.program import Buffer, Index, Program, Task

SLOW_LINKS = 0.8  # part of the predicted rate that links give in the step that says how sturdy a plan is


@dataclass(frozen=True)
class Timeline:
    """Times at which each task of a program runs, and the buffers that are live. Seconds and bytes; tasks in issue order."""

    program: Program = field(repr=False)
    starts: tuple[float, ...] = field(repr=False)
    ends: tuple[float, ...] = field(repr=False)
    turns: tuple[float, ...] = field(repr=False)  # when the compute stream reaches the point where a task was issued

    @cached_property
    def step_time(self) -> float:
        """Return when the last task ends."""
        return max(self.ends, default=0.0)

    @cached_property
    def compute(self) -> float:
        """Return the seconds in which the compute stream is busy."""
        return sum(self.compute_by_task, 0.0)

    @cached_property
    def compute_by_task(self) -> tuple[float, ...]:
        """Return, per task, the seconds in which it keeps the compute stream busy: 0 for a collective."""
        spans = zip(self.program.tasks, self.starts, self.ends, strict=True)
        return tuple(0.0 if task.is_collective else end - start - task.waiting for task, start, end in spans)

    @cached_property
    def communication(self) -> float:
        """Return the seconds in which at least one link is busy."""
        return sum((end - start for start, end in self._communicating), 0.0)

    @cached_property
    def exposed(self) -> float:
        """Return the seconds of communication in which the device computes nothing."""
        return sum((self._idle.within(start, end) for start, end in self._communicating), 0.0)

    @property
    def hidden(self) -> float:
        """Return the seconds of communication in which the device computes."""
        return self.communication - self.exposed

    @cached_property
    def exposed_by_task(self) -> tuple[tuple[Task, float], ...]:
        """Return, per collective or kernel that sends, its seconds in which the device computes nothing.

        Two that run at the same time on two links both count it: the sum can exceed `exposed`.
        """
        spans = zip(self.program.tasks, self.starts, self.ends, strict=True)
        return tuple(
            (task, self._idle.within(*task.span_of_link(start, end))) for task, start, end in spans if task.is_sending
        )

    def kernels_beside(self, start: float, end: float) -> Iterator[tuple[Task, float]]:
        """Yield the kernels that compute between `start` and `end`, with the seconds of it in which each does."""
        spans, begins = self._computing
        for number in range(max(0, bisect_right(begins, start) - 1), bisect_left(begins, end)):
            task, begin, finish = spans[number]
            if (seconds := min(end, finish) - max(start, begin)) > 0:
                yield task, seconds

    @cached_property
    def _computing(self) -> tuple[list[tuple[Task, float, float]], list[float]]:
        """Return the kernels with the times between which each computes, in order, and their starts."""
        spans = zip(self.program.tasks, self.starts, self.ends, strict=True)
        found = [(task, *task.span_of_compute(start, end)) for task, start, end in spans if not task.is_collective]
        return found, [begin for _, begin, _ in found]

    @cached_property
    def exposed_spans(self) -> tuple[tuple[int, float, float], ...]:
        """Return start and end of each exposed interval, with the number of the collective or kernel that sends in it."""
        spans = enumerate(zip(self.program.tasks, self.starts, self.ends, strict=True))
        return tuple(
            (number, *span)
            for number, (task, start, end) in spans
            if task.is_sending
            for span in self._idle.spans(*task.span_of_link(start, end))
        )

    @cached_property
    def _idle(self) -> _Gaps:
        spans = zip(self.program.tasks, self.starts, self.ends, strict=True)
        return _gaps([task.span_of_compute(start, end) for task, start, end in spans if not task.is_collective])

    @cached_property
    def _communicating(self) -> list[tuple[float, float]]:
        spans = zip(self.program.tasks, self.starts, self.ends, strict=True)
        return _union(sorted(task.span_of_link(start, end) for task, start, end in spans if task.is_sending))

    @cached_property
    def slowed_step_time(self) -> float:
        """Return the seconds of the step when links give `SLOW_LINKS` of the rate that is predicted."""
        return simulate(self.program, links=1 / SLOW_LINKS).step_time

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Return the bytes live at each task's turn."""
        return tuple(bytes_by_turn(self.program, self._lives))

    @cached_property
    def peak_memory(self) -> int:
        """Return the most bytes that are live at one turn."""
        return max(self.memory, default=0)

    @cached_property
    def peak_task(self) -> int:
        """Return the number of the task at whose turn most memory is live; the first of several."""
        return self.memory.index(self.peak_memory) if self.memory else 0

    @cached_property
    def live_at_peak(self) -> tuple[Buffer, ...]:
        """Return the buffers live at the peak, the largest first."""
        firsts, lasts = self._lives
        held = [b for i, b in enumerate(self.program.buffers) if firsts[i] <= self.peak_task <= lasts[i] and b.nbytes]
        return tuple(sorted(held, key=lambda buffer: (-buffer.nbytes, buffer.name)))

    @cached_property
    def memory_by_kind(self) -> dict[str, int]:
        """Return the bytes at the peak by kind of buffer, and the `workspace` of the task that runs there."""
        found = bytes_by_kind(self.live_at_peak)
        workspace = self.program.tasks[self.peak_task].workspace if self.program.tasks else 0
        return found | {"workspace": workspace} if workspace else found

    @property
    def lives(self) -> tuple[tuple[int, int], ...]:
        """Return, per buffer, the first and the last turn at which it is live; it is never live if last < first."""
        return tuple(zip(*self._lives, strict=True))

    @cached_property
    def _lives(self) -> tuple[list[int], list[int]]:
        return lives(self.program, self.starts, self.ends)


def simulate(program: Program, *, links: float = 1.0) -> Timeline:
    """Return when each task runs, by the rules of the module's docstring. Collectives take `links` times their seconds."""
    index = program.index
    seconds = [own * links if stream else own for own, stream in zip(index.seconds, index.streams, strict=True)]
    return Timeline(program, *_times(index, seconds, program.contention))


def _times(
    index: Index, seconds: list[float], contention: Contention
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    clocks = [0.0, 0.0, 0.0]  # per stream, when it has run all tasks issued so far
    ready = [0.0] * len(index.sizes)
    starts, ends, turns = list[float](), list[float](), list[float]()
    running = index.calls[0] if index.calls else 0
    is_contended, slows_links = bool(contention), contention.links > 0
    pending = list[int]()  # collectives that a later kernel may overlap
    for inputs, outputs, stream, held, duration, call in zip(
        index.inputs, index.outputs, index.streams, index.holds, seconds, index.calls, strict=True
    ):
        turn = clocks[0]
        for buffer in inputs:
            if ready[buffer] > turn:
                turn = ready[buffer]
        if call > running:
            running, turn = call, max(turn, *clocks)
        clocks[0] = turn
        start = turn if stream == held else max(turn, clocks[stream or held])
        end = start + duration
        if stream:
            if slows_links:
                pending.append(len(starts))
        elif is_contended and not held:
            end = contention.kernel_end(start, duration, max(clocks[1], clocks[2]))
            if slows_links:
                clocks = [contention.link_time(time, start, end) for time in clocks]
                for number in pending:
                    starts[number] = contention.link_time(starts[number], start, end)
                    ends[number] = contention.link_time(ends[number], start, end)
                    for buffer in index.outputs[number]:
                        ready[buffer] = ends[number]
                pending = [number for number in pending if ends[number] > end]
        clocks[stream] = end
        if held:
            clocks[held] = end
        for buffer in outputs:
            ready[buffer] = end
        starts.append(start)
        ends.append(end)
        turns.append(turn)
    return tuple(starts), tuple(ends), tuple(turns)


@dataclass(frozen=True)
class _Gaps:
    """The intervals in which the compute stream is idle: disjoint, in order, the last one without end."""

    starts: list[float]
    ends: list[float]
    before: list[float]  # seconds idle before each

    def within(self, start: float, end: float) -> float:
        """Return the idle seconds between `start` and `end`."""
        return self._until(end) - self._until(start)

    def spans(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the idle intervals between `start` and `end`."""
        found = []
        for number in range(bisect_right(self.ends, start), len(self.starts)):
            if self.starts[number] >= end:
                break
            found.append((max(start, self.starts[number]), min(end, self.ends[number])))
        return found

    def _until(self, time: float) -> float:
        number = bisect_left(self.ends, time)
        return self.before[number] + max(0.0, time - self.starts[number])


def _gaps(spans: Sequence[tuple[float, float]]) -> _Gaps:
    starts, ends, clock = [], [], 0.0
    for start, end in spans:
        if start > clock:
            starts.append(clock)
            ends.append(start)
        clock = max(clock, end)
    starts.append(clock)
    ends.append(float("inf"))
    lengths = [end - start for start, end in zip(starts[:-1], ends[:-1], strict=True)]
    return _Gaps(starts, ends, list(accumulate(lengths, initial=0.0)))


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint intervals that cover the same time; `spans` are sorted by start."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
