"""Forward and backward of a step as programs of their own: each is a graph that is cut, joined and ordered by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.cost.program import OPTIMIZER, PERSISTENT, Program, Task


def phases(program: Program) -> Iterator[tuple[Program, float]]:
    """Forward, backward and update, as far as there are any, each with the least seconds that the rest of the step takes.

    All that the device holds meanwhile is counted: what the others need is there from the start or stays to the end.
    """
    parts: dict[int, list[Task]] = {}
    for task, call in zip(program.tasks, program.index.calls, strict=True):
        parts.setdefault(call, []).append(task)
    compute = {phase: sum(task.seconds for task in tasks if not task.is_collective) for phase, tasks in parts.items()}
    for phase in sorted(parts):
        yield _part(program, phase, parts[phase]), sum(compute.values()) - compute[phase]


def joined(program: Program, parts: Sequence[Program]) -> Program:
    """The step whose `phases` were changed to `parts`: its tasks as they stand there, and the buffers that came with them."""
    known = {buffer.name for buffer in program.buffers}
    added = [buffer for part in parts for buffer in part.buffers if buffer.name not in known]
    tasks = tuple(task for part in parts for task in part.tasks)
    return replace(program, tasks=tasks, buffers=(*program.buffers, *added))


def unchanged(before: Program, found: Program, program: Program) -> dict[int, Program]:
    """Phases of `program`, by number, as `found` has them: of those whose tasks are the same as `before`, from which `found`
    was made, but for the names of what other phases give them."""
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
    """What the inputs of tasks are called in others that are the same but for that; None where they are not."""
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
    """Number of its phase: forward, backward, update."""
    return 2 if task.kind == OPTIMIZER else int(task.backward)


def _part(program: Program, phase: int, tasks: list[Task]) -> Program:
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
            buffers.append(replace(buffer, kind="output" if last > phase else "activation"))  # there from the start
    return replace(program, tasks=tuple(tasks), buffers=tuple(buffers))
