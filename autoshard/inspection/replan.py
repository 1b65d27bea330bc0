"""What a plan that was made in this process stands on: it can be asked what it was not asked yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.garbage import uncollected
from autoshard.config.constraints import check_options
from autoshard.config.options import Options
from autoshard.config.topology import equipped, mesh_of
from autoshard.planner.evaluation import Folded, refold, seeded
from autoshard.planner.problem import Problem
from autoshard.planner.recomputation import room_for
from passes.errors import UserError
from passes.hardware.hardware import Hardware
from passes.ir.mesh import Mesh
from passes.search.find import Goal, Prepared, Searched, prepare

if TYPE_CHECKING:
    from autoshard.plans.plan import ShardingPlan

CAPTURED_WITH = ("mixed_precision",)  # options that the captured graph depends on


@dataclass(frozen=True, eq=False)
class Basis:
    """The captured model as it was planned, with its repeated layers left out, and what a search found out about it."""

    problem: Problem
    folded: Folded
    replan: Callable[[Problem, Folded | None, bool], ShardingPlan]  # folded, where that is known; whether quick
    prepared: Prepared | None = None  # for the search that made the plan
    gap: float = Goal.gap  # that the search was content with

    @property
    def is_quick(self) -> bool:
        """Whether the plan answers a question and is not proven as far as it could be."""
        return self.gap > Goal.gap

    @cached_property
    def searched(self) -> Searched:
        """What a search knows of the model: made when it is first asked for. Raises UserError where the hardware is
        unknown."""
        prepared = self.prepared
        if prepared is None:
            gm = seeded(self.problem, self.folded, (None,) * self.problem.mesh.ndim)
            prepared = prepare(gm, self.problem.mesh)
        options = self.problem.options
        room = room_for(self.problem, prepared)
        return prepared.explore(Goal(room.limit, self.gap, options.time_limit, options.keeps_gathered, room.relief))

    def changed(
        self, mesh: Mesh | DeviceMesh | str | None, hardware: str | Hardware | None, options: dict[str, Any], *, prove: bool
    ) -> ShardingPlan:
        """The plan of the same captured model on another mesh, on other hardware or with other options; where it has to be
        searched for, the first good one, unless it is to `prove` more.

        Raises UserErrors for what cannot work, and for an option that the capture depends on.
        """
        known = [field.name for field in fields(Options) if field.name not in CAPTURED_WITH]
        for name in options:
            if name not in known:
                why = "needs a new capture: call autoshard.plan(...)" if name in CAPTURED_WITH else "is no option"
                raise UserError(f"plan.replan({name}=...) {why}; replan takes mesh, {', '.join(known)}")
        if hardware is not None:
            options = {**options, "hardware": hardware}
        wanted = self.problem.mesh if mesh is None else mesh_of(mesh, options.get("hardware", "auto"))
        if isinstance(mesh, Mesh) and mesh.hardware is not None:
            options = {**options, "hardware": "auto"}  # the new mesh names it, instead of the plan's options
        changed = replace(self.problem.options, **{"dump": False, **options})  # not over that of the plan that is asked
        if mesh is not None and wanted.hardware is None and self.problem.mesh.hardware is not None:
            wanted = wanted.on(self.problem.mesh.hardware)
        wanted = equipped(wanted, changed.hardware, self.problem.device)
        check_options(changed, wanted)
        problem = replace(self.problem, mesh=wanted, options=changed)
        with uncollected():
            return self.replan(problem, refold(problem, self.problem, self.folded), not prove)
