"""That no plan is shorter: shown where it is so, and never where it is not."""

import pytest

from passes.search.bound import Dual
from passes.search.find import solve
from passes.search.refute import is_refuted
from passes.search.relax import Relaxation
from passes.search.sides import Sides
from tests.search.test_find import EXACT, problem_of, small_graph

WEAK = 1  # sweeps of dual ascent: a bound with room below the best plan
SEEDS = range(23, 31)


def duals(seed: int):  # type: ignore[no-untyped-def]
    """A problem, its least step (test_find shows that it is that), and a dual whose bound is not there yet."""
    problem, prices = problem_of(small_graph(seed, "dp=2,tp=2"))
    dual = Relaxation(Sides(problem, prices)).dual
    dual.ascend(WEAK)
    return problem, solve(problem, prices, EXACT)[0].objective, dual


def struck(dual: Dual, worst: float) -> Dual:
    found = dual.copied()
    found.strike(worst, 0)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_no_time_that_a_plan_takes_is_refuted(seed: int) -> None:
    problem, least, dual = duals(seed)
    assert not is_refuted(problem, struck(dual, least * 1.0001))


def test_what_the_bound_leaves_open_is_refuted_by_probing() -> None:
    open_, refuted = 0, 0
    for seed in SEEDS:
        problem, least, dual = duals(seed)
        worst = least - 0.2 * (least - dual.bound)
        if dual.bound < 0.999 * worst:
            open_ += 1
            refuted += is_refuted(problem, struck(dual, worst))
    assert open_ > 0 and refuted == open_
