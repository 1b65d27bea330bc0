"""Plan a captured model again on another mesh, on other hardware or with other options."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.garbage import uncollected
from autoshard.config.constraints import check_options
from autoshard.config.options import Options
from autoshard.config.topology import equipped, mesh_of
from autoshard.planner.decision import Present
from autoshard.planner.effort import FULL, QUICK
from autoshard.planner.evaluation import refold
from autoshard.planner.make_plan import plan_problem
from autoshard.planner.problem import padding_as_given
from autoshard.planner.state import PlanningState
from autoshard.plans.record import PlanRecord
from passes.errors import UserError
from passes.hardware.hardware import Hardware
from passes.ir.mesh import Mesh

CAPTURED_WITH = ("mixed_precision",)  # options that the captured graph depends on


def replanned(
    plan: PlanRecord,
    state: PlanningState,
    mesh: Mesh | DeviceMesh | str | None,
    hardware: str | Hardware | None,
    options: dict[str, Any],
    *,
    prove: bool,
) -> tuple[PlanRecord, PlanningState]:
    """Plan the captured model of `state` again.

    If the plan has to be searched for, it is the first good one, or if that is slower, the present `plan`, unless the search is
    to `prove` more. Raises UserErrors for requests that cannot work, and for an option that the capture depends on.
    """
    known = [field.name for field in fields(Options) if field.name not in CAPTURED_WITH]
    for name in options:
        if name not in known:
            why = "needs a new capture: call autoshard.plan(...)" if name in CAPTURED_WITH else "is no option"
            raise UserError(f"plan.replan({name}=...) {why}; replan takes mesh, {', '.join(known)}")
    if hardware is not None:
        options = {**options, "hardware": hardware}
    before = state.problem
    wanted = before.mesh if mesh is None else mesh_of(mesh, options.get("hardware", "auto"))
    if isinstance(mesh, Mesh) and mesh.hardware is not None:
        options = {**options, "hardware": "auto"}  # the new mesh names it, instead of the plan's options
    changed = replace(before.options, **{"dump": False, **options})  # do not overwrite the dump of the original plan
    if mesh is not None and wanted.hardware is None and before.mesh.hardware is not None:
        wanted = wanted.on(before.mesh.hardware)
    wanted = equipped(wanted, changed.hardware, before.device)
    check_options(changed, wanted)
    problem = padding_as_given(replace(before, mesh=wanted, options=changed, pads=True))
    with uncollected():
        folded = refold(problem, before, state.folded)
        if prove:
            return plan_problem(problem, effort=FULL, folded=folded)
        return plan_problem(problem, effort=QUICK, folded=folded, present=Present(plan, before))
