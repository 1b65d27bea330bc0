"""The simulated step of a plan over time."""

from __future__ import annotations

from itertools import accumulate

from autoshard.plans.record import PlanRecord
from passes.cost.simulate import Timeline
from passes.errors import UserError

KINDS = ("parameter", "buffer", "optimizer", "gradient", "input", "output", "activation", "gathered", "temporary")
WORKSPACE = "workspace"


def timeline_of(plan: PlanRecord) -> Timeline:
    """Return the simulated step. Raises UserError for a plan that has none."""
    if plan.timeline is None:
        raise UserError(
            "this plan has no simulated step: its hardware is unknown, or it was made by passes of your own; "
            "make it with plan(model, Mesh('dp=8', hardware='h100'), args), or run with Options(hardware='cpu')"
        )
    return plan.timeline


def is_timed(plan: PlanRecord) -> bool:
    """Return whether the plan's collectives have times."""
    return plan.timeline is not None and all(one.exposed is not None for one in plan.collectives)


def memory_by_turn(timeline: Timeline) -> dict[str, list[int]]:
    """Return bytes live at each task's turn, by kind; they add up to `timeline.memory`."""
    program = timeline.program
    changes = {kind: [0] * (len(program.tasks) + 1) for kind in KINDS}
    for buffer, (first, last) in zip(program.buffers, timeline.lives, strict=True):
        if first <= last:
            changes[buffer.kind][first] += buffer.nbytes
            changes[buffer.kind][last + 1] -= buffer.nbytes
    found = {kind: list(accumulate(deltas))[:-1] for kind, deltas in changes.items()}
    found[WORKSPACE] = [task.workspace for task in program.tasks]
    return {kind: sizes for kind, sizes in found.items() if any(sizes)}
