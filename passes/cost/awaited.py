"""Describe a step that is not overlapped: each collective is awaited where it is issued."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from passes.cost.program import Program, Task


def awaited_at_once(program: Program) -> Program:
    """Return `program` with each collective awaited before the next task, which reads its results."""
    tasks = [*program.tasks[:1], *(_after(task, before) for before, task in pairwise(program.tasks))]
    return replace(program, tasks=tuple(tasks))


def _after(task: Task, before: Task) -> Task:
    if not before.is_collective:
        return task
    return replace(task, inputs=tuple(dict.fromkeys((*task.inputs, *before.outputs))))
