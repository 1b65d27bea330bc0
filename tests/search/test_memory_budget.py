"""Bytes over the limit cost what recomputing values takes; that is near what it takes in a program."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from autoshard import Mesh, Options, ShardingPlan, plan
from autoshard.planner import candidates
from autoshard.planner.recomputation import Kept, Settling, Trial
from autoshard.planner.ties import TIE
from examples.llama import TINY, Llama
from passes.search.goal import Goal
from passes.search.model.factor_graph import FORWARD_END, Variable
from passes.search.model.memory_budget import MemoryBudget, RecomputationStep, recomputation_curve
from passes.search.model.transitions import Transitions
from passes.search.optimize import solve
from passes.search.search_state import SearchState
from passes.search.solvers.evaluate import evaluate, evaluations
from passes.search.solvers.restriction import remaining
from tests.search.random_graphs import random_graph
from tests.search.unpruned import problem_of


def test_the_cheapest_bytes_are_freed_first() -> None:
    # The second point is above the line from nothing to the third.
    recomputation = recomputation_curve([(4.0, 8.0), (1.0, 1.5), (2.0, 2.0), (2.0, 5.0)])
    assert recomputation == (RecomputationStep(2.0, 1.0), RecomputationStep(2.0, 3.0))
    budget = MemoryBudget(10.0, recomputation)
    assert [budget.seconds(np.array([memory, 9.0])) for memory in (9.0, 11.0, 13.0, 14.0)] == [0.0, 1.0, 5.0, 8.0]


def test_recomputation_frees_what_is_saved_and_no_gradients() -> None:
    budget = MemoryBudget(10.0, (RecomputationStep(4.0, 1.0),))
    assert budget.fits(np.array([14.0, 10.0]))
    assert not budget.fits(np.array([14.1, 0.0])) and not budget.fits(np.array([0.0, 10.1]))
    assert budget.seconds(np.array([9.0, 12.0])) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_better_than_its_bytes_at_any_price(seed: int) -> None:
    draw = random.Random(seed)
    limit, points = draw.uniform(-2, 10), [(draw.uniform(0, 9), draw.uniform(0, 9)) for _ in range(4)]
    budget = MemoryBudget(limit, recomputation_curve(points))
    for _ in range(50):
        nbytes = np.array([budget.most - draw.uniform(0, 20), budget.limit - draw.uniform(0, 20)])
        prices = draw.uniform(0, 5), draw.uniform(0, 5)
        assert np.dot(prices, nbytes) - budget.worth(prices) <= budget.seconds(nbytes) + 1e-9


def test_a_program_counts_the_bytes_of_its_assignment_also_where_memory_is_ample() -> None:
    """Count the most that one call works on and one layer gathers: a solver may leave these as large as the memory allows."""
    factor_graph, unit_costs = problem_of(random_graph(0, "tp=2"))
    state = SearchState(Transitions(factor_graph, unit_costs), Goal(memory_limit=1e12))
    state.ascend()
    solved, _ = state.formulation(remaining(state.pruned(float("inf")))).solve(0.0, None)
    assert solved is not None
    alike = evaluations(state.transitions, solved.strategies, 0.0, state.budget)
    assert any(solved.memory == pytest.approx(one.memory, rel=1e-6) for one in alike)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "share"), [(0, 0.5), (0, 0.9), (1, 0.7), (2, 0.6), (2, 0.95)])
def test_the_plan_is_the_best_of_all_with_what_they_recompute(seed: int, share: float) -> None:
    lines = random_graph(seed, "tp=2").splitlines()
    factor_graph, unit_costs = problem_of("\n".join([*lines[:10], 'return output("output") %v2']) + "\n")
    factor_graph = replace(factor_graph, variables=tuple(map(_saved, factor_graph.variables)))
    transitions = Transitions(factor_graph, unit_costs)
    ranges = (range(len(variable.strategies)) for variable in factor_graph.variables)
    picks = [list(picked) for picked in product(*ranges)]
    free = [plan for picked in picks if (plan := evaluate(transitions, picked, keeps=0.0)) is not None]
    fastest, smallest = min(free, key=lambda one: one.objective), min(one.memory for one in free)
    limit = share * smallest  # all have to free something
    size = smallest - limit
    for recomputation in (
        (RecomputationStep(size, fastest.objective / 9 / size), RecomputationStep(size, fastest.objective / size)),
        (RecomputationStep(4 * size, fastest.objective / 50 / size),),
    ):
        budget = MemoryBudget(limit, recomputation)
        fitting = [one.objective + budget.seconds(one.bytes) for one in free if budget.fits(one.bytes)]
        found, bound = solve(factor_graph, unit_costs, Goal(limit, gap=1e-6, recomputation=recomputation))
        assert found.objective == pytest.approx(min(fitting), rel=1e-5)
        assert bound <= min(fitting) * (1 + 1e-9) and budget.fits(found.bytes)


def _saved(variable: Variable) -> Variable:
    """Return a variable whose bytes are all of the forward."""
    state = np.zeros_like(variable.state)
    state[FORWARD_END] = variable.state[FORWARD_END] + variable.working
    return replace(variable, state=state, working=np.zeros_like(variable.working))


CONFIG = replace(TINY, layers=5, dim=1024, heads=8, kv_heads=8, hidden=4096, vocab=1024, seq=512)


@cache
def searched(mesh: str) -> ShardingPlan:
    with torch.device("meta"):
        model, tokens = Llama(CONFIG), torch.empty(64, CONFIG.seq, dtype=torch.long)
    return plan(model, Mesh(mesh, hardware="h100"), (tokens, tokens), options=Options())


@pytest.mark.slow
def test_what_can_be_freed_is_near_what_a_program_frees() -> None:
    made = searched("dp=8")
    again = made.replan(recompute="block").recomputation
    assert made.state is not None and made.state.prepared is not None and again is not None
    recomputation = made.state.prepared.recomputation
    assert again.freed is not None and again.compute is not None
    assert sum(step.nbytes for step in recomputation) == pytest.approx(again.freed, rel=0.3)
    assert sum(step.nbytes * step.seconds for step in recomputation) == pytest.approx(again.compute, rel=0.5)


@pytest.mark.slow
def test_a_quick_answer_stops_at_the_first_program_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = searched("dp=8")
    assert made.cost is not None
    tried, trial = list[Trial](), Settling.trial

    def counted(self: Settling, kept: Kept) -> Trial:
        tried.append(trial(self, kept))
        return tried[-1]

    monkeypatch.setattr(Settling, "trial", counted)
    monkeypatch.setattr(candidates, "try_recipes", lambda *_: None)
    limit = int(0.5 * made.cost.peak_memory)
    quick = made.replan(memory_limit=limit)
    assert quick.cost is not None and quick.cost.peak_memory <= limit and quick.recomputation is not None
    assert tried[0].kept is None and len(tried) <= 4
    fits = [one.timeline.peak_memory <= limit for one in tried]
    assert fits[-1] and (True, True) not in pairwise(fits), "another program of a plan was tried after one that fits"
    proven = made.replan(memory_limit=limit, prove=True)
    assert proven.cost is not None and proven.cost.step_time <= quick.cost.step_time * (1 + TIE)
