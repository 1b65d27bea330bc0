"""Compute a lower bound of the communication that any order of a program's tasks exposes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from passes.cost.program import OPTIMIZER, STREAMS, Program

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ROWS = 1024  # of a table of tasks x tasks that are computed at once: 8 MB for each 1024 tasks in f64


def exposed_bound(program: Program) -> float:
    """Return a lower bound of the seconds of exposed communication, for any order of the forward and of the backward.

    Each stream runs its tasks one by one, and each task waits for those that it depends on: it starts after all tasks
    of a stream that lead to it, and after a collective that leads to it and then the kernels between the two. The same
    holds after it, to the end. For any set of tasks of one stream, their earliest start, their sum, and the least time
    after one of them bound the call (Carlier 1982, "The one-machine sequencing problem"); so does the choice of what
    runs before a task, see `_one_task`. The bound minus the kernels' time is exposed.
    """
    return sum(_bound(program, phase) for phase in _phases(program))


def _phases(program: Program) -> Iterator[list[int]]:
    for backward in (False, True):
        yield [n for n, t in enumerate(program.tasks) if t.backward is backward and t.kind != OPTIMIZER]


def _bound(program: Program, phase: list[int]) -> float:
    if not phase:
        return 0.0
    seconds = np.array([program.tasks[number].seconds for number in phase])
    streams = np.array([program.index.streams[number] for number in phase])
    sources = _sources(program, phase)
    shares = np.stack([np.where(streams == stream, seconds, 0.0) for stream in range(len(STREAMS))], axis=1)
    before = _before(sources)
    heads, tails = _ends(seconds, shares, before)
    early = np.array([program.tasks[number].prefetchable for number in phase])
    longest = 0.0
    for on in (shares[:, stream] > 0 for stream in range(len(STREAMS))):
        longest = max(longest, _one_stream(heads[on], seconds[on], tails[on]))
        for some in (on, on & early, on & ~early):
            longest = max(longest, _one_task(shares, seconds[some], before[some], before[:, some].T))
    waiting = sum(program.tasks[number].waiting for number in phase)
    return max(0.0, longest - float(shares[:, 0].sum()) + waiting)


def _sources(program: Program, phase: list[int]) -> list[list[int]]:
    """Return, per task of the phase, those of the phase that write what it reads."""
    places = {number: place for place, number in enumerate(phase)}
    makers = program.index.makers
    return [sorted({places[makers[b]] for b in program.index.inputs[n] if makers[b] in places}) for n in phase]


def _before(sources: list[list[int]]) -> Flags:
    """Return, per task, the tasks that it depends on. Tasks come after their sources."""
    before = np.zeros((len(sources), len(sources)), dtype=bool)
    for task, found in enumerate(sources):
        for source in found:
            before[task] |= before[source]
            before[task, source] = True
    return before


def _ends(seconds: Floats, shares: Floats, before: Flags) -> tuple[Floats, Floats]:
    """Return, per task, the least seconds before it (head) and after it (tail). `shares` are seconds by task and stream.

    Between a collective and a task that depends on it, all kernels run that depend on the one and lead to the other.
    """
    count = len(seconds)
    links = np.flatnonzero(shares[:, 1:].any(axis=1))
    earlier, later = np.zeros_like(shares), np.zeros_like(shares)
    since, until = np.zeros((count, len(links))), np.zeros((len(links), count))
    for start in range(0, count, ROWS):
        some = slice(start, start + ROWS)
        rows = before[some].astype(np.float64)
        earlier[some] = rows @ shares
        later += rows.T @ shares[some]
        since[some] = (rows * shares[:, 0]) @ before[:, links]
        until += (before[links, some] * shares[some, 0]) @ rows
    heads, tails = earlier.max(axis=1), later.max(axis=1)
    for task in range(count):
        ahead = before[task, links]
        heads[task] = np.max((heads[links] + seconds[links] + since[task])[ahead], initial=heads[task])
    for task in reversed(range(count)):
        after = before[links, task]
        tails[task] = np.max((tails[links] + seconds[links] + until[:, task])[after], initial=tails[task])
    return heads, tails


def _one_stream(heads: Floats, seconds: Floats, tails: Floats) -> float:
    """Return the bound of one stream: the largest over sets of tasks with heads and tails of at least some values."""
    order = np.argsort(-tails, kind="stable")
    heads, seconds, tails = heads[order], seconds[order], tails[order]
    best = 0.0
    for head in np.unique(heads):
        inside = heads >= head
        best = max(best, float(head + np.max(np.cumsum(seconds[inside]) + tails[inside])))
    return best


def _one_task(shares: Floats, seconds: Floats, leads: Flags, depends: Flags) -> float:
    """Return the bound of one stream's choice among some of its tasks: each runs before a certain one, or after it.

    Before that one, some stream runs what leads to it, and what leads to each task before it alone; after it, some stream
    runs what depends on it, and on each task after it alone. The stream itself runs those tasks. So kernels that are held
    back to run beside the last reduction bring the time of their own reductions after it. `seconds` are of these tasks;
    `leads` and `depends` say, of all tasks, what leads to each and what depends on it.
    """
    best = 0.0
    for earlier, alone_earlier in _sides(shares, seconds, leads):
        for later, alone_later in _sides(shares, seconds, depends):
            least = np.minimum(alone_earlier, alone_later)
            best = max(best, float(np.max(earlier + seconds + later + least.sum() - least, initial=0.0)))
    return best


def _sides(shares: Floats, seconds: Floats, beside: Flags) -> Iterator[tuple[Floats, Floats]]:
    """Yield, by stream, its seconds of the tasks that are `beside` each task, and beside that task alone."""
    yield np.zeros_like(seconds), seconds
    alone = beside & (beside.sum(axis=0) == 1)
    for stream in range(len(STREAMS)):
        yield beside @ shares[:, stream], alone @ shares[:, stream]
