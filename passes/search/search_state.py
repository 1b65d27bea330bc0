"""The state of one search: the relaxation with its lower bound, and the incumbent with its upper bound."""

from __future__ import annotations

import time

from passes.search.goal import Goal
from passes.search.model.transitions import Transitions
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.dual_rounding import rounded
from passes.search.solvers.evaluate import Assignment, evaluate
from passes.search.solvers.mip import Formulation
from passes.search.solvers.multipliers import Multipliers
from passes.search.solvers.relaxation import Relaxation
from passes.search.solvers.restriction import Restriction

SWEEPS = 30  # of dual ascent, at most; it stops before where the bound hardly grows
PRUNING_SWEEPS = 3  # of dual ascent while pruning: each raises reduced costs, so that more is pruned


class SearchState:
    """Lower bound, incumbent and clock of a search; the steps of `optimize` change it until the bounds meet."""

    def __init__(self, transitions: Transitions, goal: Goal) -> None:
        self.started = time.perf_counter()
        self.transitions, self.factor_graph = transitions, transitions.factor_graph
        self.goal, self.budget = goal, goal.budget
        self.relaxation = Relaxation(transitions)
        self.bound = 0.0  # seconds that no assignment is better than
        self.incumbent: Assignment | None = None  # the best that fits
        self.seen: list[Assignment] = []  # roundings of the relaxation, whether they fit or not
        if goal.time_limit is not None:
            self.dual.deadline = self.started + goal.time_limit

    @property
    def dual(self) -> Dual:
        """Return the dual of the relaxation, under the multipliers of the moment."""
        return self.relaxation.dual

    @property
    def dual_bound(self) -> float:
        """Return the bound on the step under the multipliers of the moment, in seconds."""
        return self.dual.bound - self.relaxation.discount(self.budget)

    @property
    def smallest(self) -> float:
        """Return the bytes of the smallest assignment seen."""
        return min((assignment.memory for assignment in self.seen), default=float("inf"))

    @property
    def is_proven(self) -> bool:
        """Return whether the gap between incumbent and bound is closed."""
        best = self.incumbent
        return best is not None and best.objective - self.bound <= self.goal.gap * best.objective

    @property
    def is_late(self) -> bool:
        """Return whether the time limit has passed."""
        return self.goal.time_limit is not None and time.perf_counter() - self.started > self.goal.time_limit

    @property
    def is_done(self) -> bool:
        """Return whether the gap is closed or the time limit has passed."""
        return self.is_proven or self.is_late

    @property
    def seconds_left(self) -> float | None:
        """Return the time limit for a program: the remaining time, but enough to find a solution."""
        if self.goal.time_limit is None:
            return None
        return max(0.1, self.goal.time_limit - (time.perf_counter() - self.started))

    def ascend(self, tolerance: float = 1e-5) -> None:
        """Raise the dual's bound, take it, and look at the assignments that the dual rounds to."""
        self.dual.ascend(SWEEPS, tolerance)
        self._take_bound_and_rounding()

    def reweigh(self, multipliers: Multipliers, tolerance: float = 1e-4) -> None:
        """Change the multipliers and ascend under them."""
        self.relaxation.reweigh(multipliers)
        self.ascend(tolerance)

    def raise_bound(self, seconds: float) -> None:
        """Take a bound that was proven."""
        self.bound = max(self.bound, seconds)

    def offer(self, assignment: Assignment | None) -> None:
        """Take an assignment that fits as the incumbent if it is better."""
        if assignment is not None and (self.incumbent is None or assignment.objective < self.incumbent.objective):
            self.incumbent = assignment

    def offer_solved(self, assignment: Assignment | None) -> None:
        """Offer the solution of a program, which may keep other values than the goal says."""
        kept = self._keeping(assignment)
        if kept is assignment or (kept is not None and self._fits(kept)):
            self.offer(kept)

    def pruned(self, threshold: float) -> Dual:
        """Return the dual without strategies and transitions that are in no assignment shorter than `threshold` seconds."""
        dual = self.dual.copied()
        dual.prune(threshold + self.relaxation.discount(self.budget), PRUNING_SWEEPS)
        return dual

    def formulation(self, restriction: Restriction) -> Formulation:
        """Return the program of a restriction within the memory budget."""
        return Formulation(self.transitions, restriction, self.budget)

    def result(self, assignment: Assignment) -> tuple[Assignment, float]:
        """Pair an assignment with the bound."""
        return assignment, min(self.bound, assignment.objective)

    def _take_bound_and_rounding(self) -> None:
        byte = self.relaxation.multipliers.byte
        self.raise_bound(self.dual_bound)
        strategies = rounded(self.dual, range(len(self.dual.unary)))
        for keeps in dict.fromkeys((byte, 0.0, float("inf"))):
            assignment = self._keeping(evaluate(self.transitions, strategies, keeps=keeps, budget=self.budget))
            if assignment is None:
                return
            self.seen.append(assignment)
            if self._fits(assignment):
                self.offer(assignment)

    def _fits(self, assignment: Assignment) -> bool:
        return self.budget is None or self.budget.fits(assignment.memory)

    def _keeping(self, assignment: Assignment | None) -> Assignment | None:
        """Return the same strategies with gathered parameters kept as the goal says."""
        if assignment is None or self.goal.keep_gathered is None:
            return assignment
        keeps, byte = 0.0 if self.goal.keep_gathered else float("inf"), self.relaxation.multipliers.byte
        return evaluate(self.transitions, assignment.strategies, keeps=keeps, repeats=byte, budget=self.budget)
