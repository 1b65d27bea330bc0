"""Split a step into forward, backward and update: each is a graph whose collectives are cut, bucketed and ordered alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.cost.program import OPTIMIZER, PERSISTENT, Program, Task


def phases(program: Program) -> Iterator[tuple[Program, float]]:
    """Yield forward, backward and update, if there are any, each with the least seconds that the rest of the step takes.

    A part counts everything that the device holds meanwhile: what the other parts need is live from the start or to the end.
    """
    parts: dict[int, list[Task]] = {}
    for task, call in zip(program.tasks, program.index.calls, strict=True):
        parts.setdefault(call, []).append(task)
    compute = {phase: sum(task.seconds for task in tasks if not task.is_collective) for phase, tasks in parts.items()}
    for phase in sorted(parts):
        yield _part(program, phase, parts[phase]), sum(compute.values()) - compute[phase]


def joined(program: Program, parts: Sequence[Program]) -> Program:
    """Return the step whose `phases` were changed to `parts`: their tasks in their order, and the buffers that they added."""
    known = {buffer.name for buffer in program.buffers}
    added = [buffer for part in parts for buffer in part.buffers if buffer.name not in known]
    tasks = tuple(task for part in parts for task in part.tasks)
    return replace(program, tasks=tasks, buffers=(*program.buffers, *added))


def unchanged(before: Program, found: Program, program: Program) -> dict[int, Program]:
    """Return the phases of `program`, by number, that can be taken from `found`, a result that was computed from `before`.

    A phase can be taken if its tasks equal those in `before` except for the names of buffers that other phases write.
    """
    kept = {}
    for phase in {phase_of(task) for task in program.tasks}:
        old, own, new = ([task for task in one.tasks if phase_of(task) == phase] for one in (before, found, program))
        names = _renamed(old, new)
        if names is not None:
            tasks = tuple(replace(task, inputs=tuple(names.get(name, name) for name in task.inputs)) for task in own)
            made = {name for task in tasks for name in task.outputs}
            kept[phase] = replace(found, tasks=tasks, buffers=tuple(one for one in found.buffers if one.name in made))
    return kept


def _renamed(old: list[Task], new: list[Task]) -> dict[str, str] | None:
    """Return the new names of the old tasks' inputs; None if the tasks differ in more than that."""
    names: dict[str, str] = {}
    if len(old) != len(new):
        return None
    for one, other in zip(old, new, strict=True):
        if replace(one, inputs=()) != replace(other, inputs=()) or len(one.inputs) != len(other.inputs):
            return None
        if any(names.setdefault(*pair) != pair[1] for pair in zip(one.inputs, other.inputs, strict=True)):
            return None
    return names


def phase_of(task: Task) -> int:
    """Return the number of a task's phase: 0 forward, 1 backward, 2 update."""
    return 2 if task.kind == OPTIMIZER else int(task.backward)


def _part(program: Program, phase: int, tasks: list[Task]) -> Program:
    """Return one phase as a program; `made` and `last` are the phases that write a buffer and read it last."""
    index, buffers = program.index, []
    for buffer, maker, readers in zip(program.buffers, index.makers, index.readers, strict=True):
        made = index.calls[maker] if maker >= 0 else phase
        if made > phase:
            continue
        calls = [index.calls[reader] for reader in readers]
        last = max(calls, default=made)
        if buffer.kind in PERSISTENT:
            buffers.append(buffer)
        elif made == phase:
            if maker >= 0 or phase in calls:
                buffers.append(replace(buffer, kind="output") if last > phase else buffer)
        elif phase <= last:
            buffers.append(replace(buffer, kind="output" if last > phase else "activation"))  # live from the start
    return replace(program, tasks=tuple(tasks), buffers=tuple(buffers))
