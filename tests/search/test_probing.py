"""Prove that no assignment is shorter: where it is so, and never where it is not."""

import pytest

from passes.search.model.transitions import Transitions
from passes.search.optimize import solve
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.probing import is_empty
from passes.search.solvers.relaxation import Relaxation
from tests.search.random_graphs import random_graph
from tests.search.unpruned import EXACT, problem_of

WEAK = 1  # sweeps of dual ascent: a bound well below the best assignment
SEEDS = range(23, 31)


def duals(seed: int):  # type: ignore[no-untyped-def]
    """Return a factor graph, its least step (test_optimize shows that it is that), and a dual whose bound is not there yet."""
    factor_graph, unit_costs = problem_of(random_graph(seed, "dp=2,tp=2"))
    dual = Relaxation(Transitions(factor_graph, unit_costs)).dual
    dual.ascend(WEAK)
    return factor_graph, solve(factor_graph, unit_costs, EXACT)[0].objective, dual


def pruned(dual: Dual, threshold: float) -> Dual:
    found = dual.copied()
    found.prune(threshold, 0)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_no_time_that_a_plan_takes_is_empty(seed: int) -> None:
    factor_graph, least, dual = duals(seed)
    assert not is_empty(factor_graph, pruned(dual, least * 1.0001))


def test_what_the_bound_leaves_open_is_empty_by_probing() -> None:
    open_, proven = 0, 0
    for seed in SEEDS:
        factor_graph, least, dual = duals(seed)
        threshold = least - 0.2 * (least - dual.bound)
        if dual.bound < 0.999 * threshold:
            open_ += 1
            proven += is_empty(factor_graph, pruned(dual, threshold))
    assert open_ > 0 and proven == open_
