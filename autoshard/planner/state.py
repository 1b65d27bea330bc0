"""What the planner knows of a model behind a plan: with it, the plan answers what it was not asked yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoshard.planner.effort import Effort
from autoshard.planner.evaluation import Folded, seeded
from autoshard.planner.problem import Problem
from autoshard.planner.recomputation import room_for
from passes.search.goal import Goal
from passes.search.prepared import Prepared, Searched, prepare


@dataclass(frozen=True, eq=False)
class PlanningState:
    """The captured model as it was planned, with its repeated layers left out, and what a search found out about it."""

    problem: Problem
    folded: Folded
    effort: Effort
    prepared: Prepared | None = None  # for the search that made the plan

    @cached_property
    def searched(self) -> Searched:
        """What a search knows of the model: made when it is first needed. Raises UserError where the hardware is unknown."""
        prepared = self.prepared
        if prepared is None:
            gm = seeded(self.problem, self.folded, (None,) * self.problem.mesh.ndim)
            prepared = prepare(gm, self.problem.mesh)
        options = self.problem.options
        room = room_for(self.problem, prepared)
        return prepared.explore(Goal(room.limit, self.effort.gap, options.time_limit, options.keeps_gathered, room.recomputation))
