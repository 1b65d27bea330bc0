"""The state of one search: its relaxation, the bounds on the shortest step, and the time that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from passes.search.goal import Goal
from passes.search.model.transitions import Transitions
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.dual_rounding import rounded
from passes.search.solvers.evaluate import Assignment, evaluate, evaluations
from passes.search.solvers.mip import Formulation
from passes.search.solvers.multipliers import Multipliers
from passes.search.solvers.relaxation import Relaxation
from passes.search.solvers.restriction import Restriction

SWEEPS = 30  # of dual ascent, at most; it stops before where the bound hardly grows
TOO_SLOW = 10.0  # times the fastest assignment: those that fit are not looked for if they are slower
PRUNING_SWEEPS = 3  # of dual ascent while pruning: each raises reduced costs, so that more is pruned


class SearchState:
    """The relaxation of a search, its clock, and the bounds that the steps of `optimize` move until they meet."""

    def __init__(self, transitions: Transitions, goal: Goal, warm_start: WarmStart | None = None) -> None:
        self.transitions, self.factor_graph = transitions, transitions.factor_graph
        self.goal, self.budget = goal, goal.budget
        self.clock, self.bounds = Clock(goal.time_limit), Bounds(goal.gap)
        self.relaxation = Relaxation(transitions)
        self.dual.deadline = self.clock.deadline
        self.warm_start = warm_start
        self.left = warm_start  # for a search of other prices
        self.seen: list[Assignment] = []  # roundings of the relaxation, whether they fit or not

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
    def fastest(self) -> float:
        """Return the seconds of the fastest assignment seen, whether it fits or not."""
        return min((assignment.objective for assignment in self.seen), default=float("inf"))

    @property
    def is_hopeless(self) -> bool:
        """Return whether all that fit are proven to take the cutoff or, if none of them was seen, to be far slower than the
        fastest seen.
        """
        if self.bounds.lower >= self.goal.cutoff:
            return True
        return self.bounds.incumbent is None and self.bounds.lower > TOO_SLOW * self.fastest

    @property
    def is_done(self) -> bool:
        """Return whether the gap is closed, the time limit has passed, or there is no hope."""
        return self.bounds.are_closed or self.clock.is_late or self.is_hopeless

    def ascend(self, tolerance: float = 1e-5) -> None:
        """Raise the dual's bound, take it, and look at the assignments that the dual rounds to."""
        self.dual.ascend(SWEEPS, tolerance)
        self.bounds.raise_lower(self.dual_bound)
        strategies = rounded(self.dual, range(len(self.dual.unary)))
        for found in evaluations(self.transitions, strategies, self.relaxation.multipliers.saved, self.budget):
            assignment = self._keeping(found)
            self.seen.append(assignment)
            if self.fits(assignment):
                self.bounds.offer(assignment)

    def reweigh(self, multipliers: Multipliers, tolerance: float = 1e-4) -> None:
        """Change the multipliers and ascend under them."""
        self.relaxation.reweigh(multipliers)
        self.ascend(tolerance)

    def offer_solved(self, assignment: Assignment | None) -> None:
        """Offer the solution of a program, which may keep other values than the goal says."""
        if assignment is not None:
            kept = self._keeping(assignment)
            if kept is assignment or self.fits(kept):
                self.bounds.offer(kept)

    def pruned(self, threshold: float) -> Dual:
        """Return the dual without strategies and transitions that are in no assignment shorter than `threshold` seconds."""
        dual = self.dual.copied()
        dual.prune(threshold + self.relaxation.discount(self.budget), PRUNING_SWEEPS)
        return dual

    def formulation(self, restriction: Restriction) -> Formulation:
        """Return the program of a restriction within the memory budget."""
        return Formulation(self.transitions, restriction, self.budget)

    def fits(self, assignment: Assignment) -> bool:
        """Return whether the memory is enough for an assignment."""
        return self.budget is None or self.budget.fits(assignment.bytes)

    def _keeping(self, assignment: Assignment) -> Assignment:
        """Return the same strategies with gathered parameters kept as the goal says."""
        if self.goal.keep_gathered is None:
            return assignment
        keeps, byte = 0.0 if self.goal.keep_gathered else float("inf"), self.relaxation.multipliers.saved
        found = evaluate(self.transitions, assignment.strategies, keeps=keeps, repeats=byte, budget=self.budget)
        assert found is not None, "the transitions are those of an assignment"
        return found


@dataclass(frozen=True)
class WarmStart:
    """Hold the multipliers that a search of other prices ended with, and the restriction that it solved."""

    multipliers: Multipliers
    restriction: Restriction


@dataclass
class Bounds:
    """Hold the shortest step between a proven lower bound and the best assignment found."""

    gap: float  # of the step: where lower bound and incumbent differ by no more, the search is done
    lower: float = 0.0  # seconds that no assignment is better than
    incumbent: Assignment | None = None  # the best that fits

    @property
    def are_closed(self) -> bool:
        """Return whether the incumbent is proven to be as good as the gap demands."""
        best = self.incumbent
        return best is not None and best.objective - self.lower <= self.gap * best.objective

    def raise_lower(self, seconds: float) -> None:
        """Take a lower bound that was proven."""
        self.lower = max(self.lower, seconds)

    def offer(self, assignment: Assignment) -> None:
        """Take an assignment that fits as the incumbent if it is better."""
        if self.incumbent is None or assignment.objective < self.incumbent.objective:
            self.incumbent = assignment

    def result(self, assignment: Assignment) -> tuple[Assignment, float]:
        """Pair an assignment with the lower bound."""
        return assignment, min(self.lower, assignment.objective)


@dataclass(frozen=True)
class Clock:
    """Measure the time since a search began against its limit, in seconds; None: no limit."""

    limit: float | None
    started: float = field(default_factory=time.perf_counter)

    @property
    def deadline(self) -> float:
        """Return when the limit has passed, by `time.perf_counter`."""
        return float("inf") if self.limit is None else self.started + self.limit

    @property
    def is_late(self) -> bool:
        """Return whether the limit has passed."""
        return time.perf_counter() > self.deadline

    @property
    def for_program(self) -> float | None:
        """Return the time limit for a program: the remaining time, but enough to find a solution."""
        return None if self.limit is None else max(0.1, self.deadline - time.perf_counter())
