"""Keep the planner's knowledge of a model, so that its plan can answer further questions."""

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
    """The captured model as it was planned, without its repeated layers, and the results of its search."""

    problem: Problem
    folded: Folded
    effort: Effort
    prepared: Prepared | None = None  # the problem of the search that made the plan

    @cached_property
    def searched(self) -> Searched:
        """Return the solver's exploration of the model, made on first use. Raises UserError if the hardware is
        unknown.
        """
        prepared, options = self.prepared, self.problem.options
        if prepared is None:
            gm = seeded(self.problem, self.folded, (None,) * self.problem.mesh.ndim)
            prepared = prepare(gm, self.problem.mesh, optimizer=options.optimizer, hiding=self.problem.hiding)
        budget = memory_budget_of(self.problem, prepared)
        keep, curve = options.keeps_gathered, budget.recomputation
        return prepared.explore(Goal(budget.limit, self.effort.gap, options.time_limit, keep, curve))
