"""What the planner knows of the model that a plan is of: with it, the plan answers new questions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoshard.planner.effort import Effort
from autoshard.planner.evaluation import Folded, seeded
from autoshard.planner.problem import Problem
from autoshard.planner.recomputation import memory_budget_of
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
        """Return what a search knows of the model, made once. Raises UserError where the hardware is unknown."""
        prepared = self.prepared
        if prepared is None:
            gm = seeded(self.problem, self.folded, (None,) * self.problem.mesh.ndim)
            prepared = prepare(gm, self.problem.mesh)
        options = self.problem.options
        budget = memory_budget_of(self.problem, prepared)
        keep, curve = options.keeps_gathered, budget.recomputation
        return prepared.explore(Goal(budget.limit, self.effort.gap, options.time_limit, keep, curve))
