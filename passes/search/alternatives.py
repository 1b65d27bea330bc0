"""Price the layouts that a search did not choose: each with everything else chosen again around it (its min-marginal)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from passes.ir.graph import item_of
from passes.ir.layout import Layout
from passes.search.model.factor_graph import ACROSS, BESIDE_INSIDE, INSIDE, Bools
from passes.search.model.transitions import INFEASIBLE
from passes.search.prepared import Searched
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.dual_rounding import min_marginals, rounded
from passes.search.solvers.evaluate import Assignment, evaluations
from passes.search.solvers.mip import Formulation
from passes.search.solvers.restriction import cheapest

SWEEPS = 5  # of dual ascent, at most, from where the search ended
CHEAPEST = 2  # strategies of every variable in the program of an alternative, in addition to those of known assignments
GAP = 0.0025  # of the step: to which that program is solved, in one node of branch and bound


@dataclass(frozen=True)
class Alternative:
    """The best plan found with one value in this layout. Seconds; bytes per device."""

    layout: Layout
    is_chosen: bool  # by the search
    step: float | None  # of the best plan found, by the search's objective; None: no assignment has this layout
    bound: float  # no plan with this layout is better
    compute: float = 0.0
    communication: float = 0.0  # hidden or not, on all links
    memory: float = 0.0
    fits: bool = True


def alternatives(searched: Searched, node: Node, *, asked: Layout, most: int, solved: int) -> tuple[Alternative, ...]:
    """Return layouts of the value of `node` that the search considers, the fastest first; none if the search did not
    decide it.

    They are the `most` promising by the search's own min-marginals, the chosen one and the one `asked` for. Each has
    the assignment that its bound rounds to; for the `solved` most promising, and the one asked for, the program of the
    strategies near the bound is solved as well.
    """
    source, position = item_of(node) or (node, 0)
    owner = searched.skeleton.owners.get(searched.skeleton.leader[source])
    if owner is None:
        return ()
    variable = searched.factor_graph.variables[owner.variable]
    groups: dict[Layout, list[int]] = {}
    for number, strategy in enumerate(variable.strategies):
        groups.setdefault(strategy.results[owner.results + position], []).append(number)
    restricted = _Restricted(searched, owner.variable)
    chosen = searched.assignment.strategies[owner.variable]
    marginals = min_marginals(searched.relaxation.dual, owner.variable)
    ranked = sorted(groups, key=lambda layout: (float(marginals[groups[layout]].min()), str(layout)))
    kept = [one for rank, one in enumerate(ranked) if rank < most or chosen in groups[one] or one == asked]
    found = []
    for rank, layout in enumerate(kept):
        dual, is_chosen = restricted.dual(groups[layout]), chosen in groups[layout]
        assignments = [searched.assignment] if is_chosen else restricted.rounded(dual)
        if not is_chosen and (rank < solved or layout == asked):
            assignments += restricted.solved(groups[layout], dual, assignments)
        found.append(restricted.alternative(layout, assignments, dual, is_chosen=is_chosen))
    return tuple(sorted(found, key=lambda one: (one.step is None, not one.fits, one.step or 0.0, not one.is_chosen)))


class _Restricted:
    """The relaxation at the end of a search, with one variable restricted to some of its strategies."""

    def __init__(self, searched: Searched, variable: int) -> None:
        self.searched, self.variable, self.budget = searched, variable, searched.budget
        self.factor_graph, self.relaxation = searched.factor_graph, searched.relaxation
        self.transitions = self.relaxation.transitions

    def dual(self, numbers: Sequence[int]) -> Dual:
        dual = self.relaxation.dual.copied()
        others = self._others(numbers)
        dual.unary[self.variable] = np.where(others, INFEASIBLE, dual.unary[self.variable])
        dual.pruned[self.variable] = dual.pruned[self.variable] | others
        dual.ascend(SWEEPS, 1e-4)
        return dual

    def rounded(self, dual: Dual) -> list[Assignment]:
        """Return the assignment that the dual rounds to, starting at the variable, and the search's assignment with
        only this variable changed."""
        rest = [other for other in range(len(self.factor_graph.variables)) if other != self.variable]
        picked = rounded(dual, [self.variable, *rest])
        changed = list(self.searched.assignment.strategies)
        changed[self.variable] = picked[self.variable]
        byte = self.relaxation.multipliers.saved
        return [one for each in (picked, changed) for one in evaluations(self.transitions, each, byte, self.budget)]

    def solved(self, numbers: Sequence[int], dual: Dual, assignments: Sequence[Assignment]) -> list[Assignment]:
        """Return the best assignment among strategies near the bound and those at hand."""
        restriction = cheapest(dual, CHEAPEST, [one.strategies for one in (self.searched.assignment, *assignments)])
        restriction.strategies[self.variable] &= ~self._others(numbers)
        assignment, _ = Formulation(self.transitions, restriction, self.budget).solve(GAP, None, nodes=1)
        return [] if assignment is None else [assignment]

    def alternative(
        self, layout: Layout, assignments: Sequence[Assignment], dual: Dual, *, is_chosen: bool
    ) -> Alternative:
        bound = max(0.0, dual.bound - self.relaxation.discount(self.budget))
        if not assignments:
            return Alternative(layout, is_chosen, None, bound)
        best = min(assignments, key=lambda assignment: (not self._fits(assignment), assignment.objective))
        variables = list(zip(self.factor_graph.variables, best.strategies, strict=True))
        kernels = np.sum([variable.loads[:, strategy] for variable, strategy in variables], axis=0)
        return Alternative(
            layout,
            is_chosen,
            best.objective,
            min(bound, best.objective),
            float(kernels[BESIDE_INSIDE]),
            float((best.loads.sum(0) - kernels)[[INSIDE, ACROSS]].sum()),
            best.memory,
            self._fits(best),
        )

    def _others(self, numbers: Sequence[int]) -> Bools:
        others = np.ones(len(self.factor_graph.variables[self.variable].strategies), dtype=np.bool_)
        others[list(numbers)] = False
        return others

    def _fits(self, assignment: Assignment) -> bool:
        return self.budget is None or self.budget.fits(assignment.bytes)
