"""Keep the planner's knowledge of a model, so that its plan can answer further questions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.planner.effort import STEPS, Effort
from autoshard.planner.evaluation import Folded, seeded
from autoshard.planner.problem import Problem
from autoshard.planner.recomputation import memory_budget_of
from passes.errors import MemoryLimitError
from passes.search.goal import Goal
from passes.search.model.axis_groups import AxisGroups, coarse_groups, single_axes
from passes.search.prepared import Prepared, Searched, prepare


@dataclass(frozen=True, eq=False)
class PlanningState:
    """The captured model as it was planned, without its repeated layers, and the results of its search."""

    problem: Problem
    folded: Folded
    effort: Effort
    prepared: Prepared | None = None  # the problem of the search that made the plan

    @property
    def axis_groups(self) -> AxisGroups:
        """Return the mesh axes that the search uses alike: those of the search that made the plan, else few enough for
        an answer in seconds.
        """
        if self.prepared is not None:
            return self.prepared.skeleton.axis_groups
        mesh = self.problem.mesh
        return next(iter(coarse_groups(mesh)), single_axes(mesh))

    @cached_property
    def searched(self) -> Searched:
        """Return the solver's exploration of the model, made on first use: in any memory, if it finds no layouts that fit.

        A recipe's plan may need more than there is, and the solver estimates more than a plan needs. Raises UserError if the
        hardware is unknown.
        """
        prepared, options = self.prepared, self.problem.options
        if prepared is None:
            gm = seeded(self.problem, self.folded, (None,) * self.problem.mesh.ndim)
            mesh, hiding = self.problem.mesh, self.problem.hiding
            prepared = prepare(gm, mesh, self.axis_groups, optimizer=options.optimizer, hiding=hiding)
        budget = memory_budget_of(self.problem, prepared)
        keep, curve = options.keeps_gathered, budget.recomputation
        goal = Goal(budget.limit, self.effort.gap, options.time_limit, keep, curve, steps=STEPS)
        try:
            return prepared.explore(goal)
        except MemoryLimitError:
            return prepared.explore(replace(goal, memory_limit=None))
