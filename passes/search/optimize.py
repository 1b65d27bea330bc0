"""Search for the assignment with the shortest step: bound it from below, find assignments from above, until they meet.

1. Ascend the dual and round it (`search_state`), with multipliers that count computation alone, or those of a search of
   other prices that went before.
2. If no assignment seen so far fits, look at those of the least memory (`tune_multipliers.fit_memory`).
3. Tune the multipliers, and solve the program of the strategies near the bound (`tune_multipliers.tune`).
4. If still none fits, solve the program of bytes alone: without one in it, the search ends here.
5. Widen: solve the program of all strategies that can be in an assignment within 1 %, 5 %, ... of the bound, or better
   than the incumbent. Assignments with any other strategy are worse, so the program's bound holds for all.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.errors import MemoryLimitError
from passes.ir.units import format_bytes
from passes.search.goal import Goal
from passes.search.model.factor_graph import FactorGraph
from passes.search.model.transitions import Transitions
from passes.search.model.unit_costs import UnitCosts
from passes.search.search_state import SearchState
from passes.search.solvers.evaluate import Assignment
from passes.search.solvers.restriction import remaining
from passes.search.tune_multipliers import LARGE, PROVABLE, fit_memory, tune

WIDENINGS = (0.01, 0.05, 0.2, 1.0, 5.0, 100.0)  # of the bound: how far over it assignments are searched; the last is all
# Transitions of a program that is solved even if nothing fits yet. One with 260,000 columns took HiGHS 12 s; the next, with
# 776,000, did not return in ten minutes.
LARGEST = 250_000


def optimize(state: SearchState) -> Iterator[tuple[Assignment, float]]:
    """Yield a good assignment; then, where it is not proven to be the best, the best found: each with the bound, in seconds.

    Raises MemoryLimitError where no assignment was found that fits the limit, or none before the cutoff was proven.
    """
    bounds = state.bounds
    if state.warm_start is None:
        state.ascend()
    else:
        state.reweigh(state.warm_start.multipliers)
    if bounds.incumbent is None and state.budget is not None and not fit_memory(state, state.budget):
        raise _too_small(state)
    if not state.is_done:
        tune(state)
    if bounds.incumbent is not None:
        yield bounds.result(bounds.incumbent)
    if bounds.are_closed:
        return
    if not state.is_hopeless:
        _widen(state)
    if bounds.incumbent is None:
        raise _too_small(state)
    yield bounds.result(bounds.incumbent)


def solve(graph: FactorGraph, unit_costs: UnitCosts, goal: Goal) -> tuple[Assignment, float]:
    """Return the last of the results of `optimize` for a factor graph."""
    return list(optimize(SearchState(Transitions(graph, unit_costs), goal)))[-1]


def _widen(state: SearchState) -> None:
    """Solve programs of ever more strategies, until the gap is closed, a program is too large, or nothing fits."""
    if not _fit(state):
        return
    for widening in WIDENINGS:
        if state.is_done:
            return
        best = state.bounds.incumbent
        is_last = best is not None and remaining(state.pruned(best.objective)).size <= PROVABLE
        threshold = float("inf") if is_last else state.dual_bound * (1 + widening)
        if not _solve_below(state, threshold) or is_last:  # the last has all that is better than the incumbent
            return


def _fit(state: SearchState) -> bool:
    """Return False if no assignment was found that fits the memory: to look for short ones then takes most of the time."""
    if state.bounds.incumbent is not None or state.budget is None:
        return True
    everything = remaining(state.pruned(float("inf")))
    if everything.size > PROVABLE:
        return True
    state.offer_solved(state.formulation(everything).fit(state.clock.for_program))
    return state.bounds.incumbent is not None


def _solve_below(state: SearchState, threshold: float) -> bool:
    """Search all assignments shorter than `threshold`, the cutoff and the incumbent; return False if they are too many for what
    they can save, or if HiGHS neither found one nor ruled them out."""
    bounds = state.bounds
    threshold = min(threshold, state.goal.cutoff)
    if bounds.incumbent is not None:
        threshold = min(threshold, bounds.incumbent.objective)
    restriction = remaining(state.pruned(threshold))
    if restriction.is_possible:
        if restriction.size > (LARGEST if bounds.incumbent is None else PROVABLE):
            return False
        if bounds.incumbent is not None and (state.clock.is_late or not _is_worthwhile(state, restriction.size)):
            return False
        assignment, bound = state.formulation(restriction).solve(state.goal.gap / 2, state.clock.for_program)
        state.offer_solved(assignment)
        bounds.raise_lower(min(threshold, bound))
        return assignment is not None or bound == float("inf")
    bounds.raise_lower(threshold)
    return True


def _is_worthwhile(state: SearchState, size: int) -> bool:
    """Return whether a program of so many transitions is small, or may save more than it takes."""
    best = state.bounds.incumbent
    return best is None or size <= LARGE or state.goal.is_worthwhile(best.objective - state.bounds.lower, size)


def _too_small(state: SearchState) -> MemoryLimitError:
    limit = state.goal.memory_limit or 0.0
    return MemoryLimitError(
        f"no layouts were found that fit {format_bytes(limit)} per device; the smallest plan found needs "
        f"{format_bytes(state.smallest)}: give more memory, more devices, or a smaller batch"
    )
