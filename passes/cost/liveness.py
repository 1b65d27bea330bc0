"""Compute which bytes a step holds in memory, and when: the model's state, and each buffer from its first to its last
use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from passes.cost.program import PERSISTENT, Buffer, Index, Program


def bytes_by_kind(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Return the sum of the buffers' bytes by kind."""
    found: dict[str, int] = {}
    for buffer in buffers:
        found[buffer.kind] = found.get(buffer.kind, 0) + buffer.nbytes
    return found


def lives(program: Program, starts: Sequence[float], ends: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the first and the last turn at which each buffer is live. A turn is the number of a task in issue order."""
    index, tasks = program.index, program.tasks
    final = len(tasks) - 1
    leaves = _leaves(index, starts, ends)
    firsts, lasts = [0] * len(program.buffers), [final] * len(program.buffers)
    for number, (buffer, maker, readers) in enumerate(zip(program.buffers, index.makers, index.readers, strict=True)):
        persistent = buffer.kind in PERSISTENT
        is_held = persistent or buffer.kind == "activation" or not readers  # live before the first task that reads it
        firsts[number] = maker if maker >= 0 else 0 if is_held else readers[0]
        if not persistent:
            last = leaves[maker] if maker >= 0 else firsts[number]
            for reader in readers:
                if leaves[reader] > last:
                    last = leaves[reader]
            lasts[number] = last
    for turn, task in enumerate(tasks):
        if task.in_place:
            _reuse(program, turn, lasts)
    return firsts, lasts


def _leaves(index: Index, starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Return, per task, the last turn until which it keeps its inputs and outputs alive."""
    kernels = [turn for turn, stream in enumerate(index.streams) if stream == 0]
    kernel_starts = [starts[turn] for turn in kernels]
    final = len(starts) - 1
    leaves = list(range(len(starts)))
    for turn, stream in enumerate(index.streams):
        if stream != 0:
            waiting = bisect_left(kernel_starts, ends[turn])
            last = kernels[waiting] - 1 if waiting < len(kernels) else final
            leaves[turn] = max(turn, last)
    return leaves


def _reuse(program: Program, turn: int, lasts: list[int]) -> None:
    """Let the outputs of a task reuse the memory of inputs of their size that no later task reads.

    A graph does not write to its own inputs, so the backward does not reuse the forward's memory.
    """
    index, buffers, backward = program.index, program.buffers, program.tasks[turn].backward
    dying = [
        b
        for b in dict.fromkeys(index.inputs[turn])
        if lasts[b] == turn and buffers[b].kind not in PERSISTENT and buffers[b].backward is backward
    ]
    for output in index.outputs[turn]:
        taken = next((b for b in dying if buffers[b].nbytes == buffers[output].nbytes), None)
        if taken is not None:
            dying.remove(taken)
            lasts[taken] = turn - 1


def bytes_by_turn(program: Program, turns: tuple[list[int], list[int]]) -> list[int]:
    """Return the live bytes at each turn, workspace included; `turns` are the first and last of each buffer."""
    if not program.tasks:
        return []
    changes = [0] * (len(program.tasks) + 1)
    for buffer, first, last in zip(program.buffers, *turns, strict=True):
        if first <= last:
            changes[first] += buffer.nbytes
            changes[last + 1] -= buffer.nbytes
    live = list(accumulate(changes))
    return [nbytes + task.workspace for nbytes, task in zip(live, program.tasks, strict=False)]
