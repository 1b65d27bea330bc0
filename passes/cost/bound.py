"""How little of a program's communication any order of its tasks could expose."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from passes.cost.program import OPTIMIZER, STREAMS, Program

Floats = NDArray[np.float64]

ROWS = 1024  # of a table of tasks by tasks that are worked on at once


def exposed_bound(program: Program) -> float:
    """Seconds of exposed communication that no order of the forward and of the backward goes below.

    Each of the streams has to run its tasks one by one, and each task waits for those that it depends on: none starts
    before all tasks of a stream that lead to it have run, nor before a collective that leads to it and then the kernels
    between the two; as much comes behind it. For any set of tasks of one stream, the earliest start of them, their sum,
    and the least that comes behind one of them bound the call (Carlier 1982, "The one-machine sequencing problem"); what
    that has beside its kernels' time is exposed.
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
    heads, tails = _ends(seconds, shares, sources)
    longest = max(
        _one_stream(heads[on], seconds[on], tails[on]) for on in (shares[:, s] > 0 for s in range(len(STREAMS)))
    )
    return max(0.0, longest - float(shares[:, 0].sum()))


def _sources(program: Program, phase: list[int]) -> list[list[int]]:
    """Per task of the phase, those of the phase that make what it reads."""
    places = {number: place for place, number in enumerate(phase)}
    makers = program.index.makers
    return [sorted({places[makers[b]] for b in program.index.inputs[n] if makers[b] in places}) for n in phase]


def _ends(seconds: Floats, shares: Floats, sources: list[list[int]]) -> tuple[Floats, Floats]:
    """Per task, the least time in front of it and behind it. `shares` are seconds by task and stream.

    Between a collective and a task that depends on it, all kernels run that depend on the one and lead to the other.
    Tasks stand behind their sources.
    """
    count = len(seconds)
    before = np.zeros((count, count), dtype=bool)  # by task, those that it depends on
    for task, found in enumerate(sources):
        for source in found:
            before[task] |= before[source]
            before[task, source] = True
    links = np.flatnonzero(shares[:, 1:].any(axis=1))
    in_front, behind = np.zeros_like(shares), np.zeros_like(shares)
    since, until = np.zeros((count, len(links))), np.zeros((len(links), count))
    for start in range(0, count, ROWS):
        some = slice(start, start + ROWS)
        rows = before[some].astype(np.float64)
        in_front[some] = rows @ shares
        behind += rows.T @ shares[some]
        since[some] = (rows * shares[:, 0]) @ before[:, links]
        until += (before[links, some] * shares[some, 0]) @ rows
    heads, tails = in_front.max(axis=1), behind.max(axis=1)
    for task in range(count):
        ahead = before[task, links]
        heads[task] = np.max((heads[links] + seconds[links] + since[task])[ahead], initial=heads[task])
    for task in reversed(range(count)):
        after = before[links, task]
        tails[task] = np.max((tails[links] + seconds[links] + until[:, task])[after], initial=tails[task])
    return heads, tails


def _one_stream(heads: Floats, seconds: Floats, tails: Floats) -> float:
    """The bound of one stream: the largest over sets with no head below one and no tail below another."""
    order = np.argsort(-tails, kind="stable")
    heads, seconds, tails = heads[order], seconds[order], tails[order]
    best = 0.0
    for head in np.unique(heads):
        inside = heads >= head
        best = max(best, float(head + np.max(np.cumsum(seconds[inside]) + tails[inside])))
    return best
