"""The search finds what exhaustive enumeration finds, and says how sure it is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import passes.rules  # registers the rules
from passes.errors import MemoryLimitError
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.search import optimize, tune_multipliers
from passes.search.goal import Goal
from passes.search.model.transitions import Transitions
from passes.search.optimize import solve
from passes.search.prepared import prepare
from passes.search.search_state import SearchState
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.evaluate import evaluate
from passes.search.solvers.mip import Formulation
from tests.search.brute_force import least_step
from tests.search.random_graphs import random_graph
from tests.search.unpruned import EXACT, SAME, drawn, problem_of, steps

assert passes.rules


SMALL = [
    *((seed, "tp=2", "h100") for seed in range(20)),
    *((seed, "tp=8", "a100-pcie") for seed in range(20, 40)),
    *((seed, "dp=2,tp=2", "h100") for seed in (*range(23, 35), *range(36, 39))),  # others have too many to enumerate
    *((seed, "dp=16,tp=8", "b200") for seed in (*range(26, 35), *range(36, 46))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "mesh", "hardware"), SMALL)
def test_no_plan_is_better(seed: int, mesh: str, hardware: str) -> None:
    factor_graph, unit_costs = problem_of(random_graph(seed, mesh), hardware)
    assert sum(node.op == "call_function" for variable in factor_graph.variables for node in variable.nodes) == 8
    plan, bound = solve(factor_graph, unit_costs, EXACT)
    best = least_step(factor_graph, unit_costs, worst=plan.objective * (1 + 1e-5))
    assert plan.objective == pytest.approx(best, rel=1e-5)
    assert bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_pruning_loses_nothing(seed: int) -> None:
    """Draw graphs of up to 60 calls; `python -m tests.search.unpruned` draws 300."""
    found = steps(*drawn(seed))
    assert found is not None and found.agrees
    assert found.lost <= SAME


@pytest.mark.parametrize("seed", range(3))
def test_the_least_step_is_that_of_the_best_of_all_plans(seed: int) -> None:
    """Draw graphs that are small enough to write all plans down."""
    lines = random_graph(seed, "tp=2").splitlines()
    factor_graph, unit_costs = problem_of("\n".join([*lines[:10], 'return output("output") %v2']) + "\n")
    assert math.prod(len(variable.strategies) for variable in factor_graph.variables) <= 60_000, "too many to enumerate"
    transitions = Transitions(factor_graph, unit_costs)
    plans = (
        evaluate(transitions, list(picked), keeps=0.0)
        for picked in product(*(range(len(variable.strategies)) for variable in factor_graph.variables))
    )
    assert least_step(factor_graph, unit_costs) == pytest.approx(min(plan.objective for plan in plans if plan is not None))


def deep_graph(layers: int, mesh: str, rows: int = 4096) -> str:
    """Return layers of two products with a kernel between them, and what is added to."""
    lines = [f"mesh {mesh}", "stage CAPTURED", f'%x: f32[{rows}, 4096] = input("x")']
    lines += [f'%{name}{i}: f32[4096, 4096] = parameter("{name}{i}")' for i in range(layers) for name in ("up", "down")]
    last = "x"
    for i in range(layers):
        lines += [
            f"%a{i}: f32[{rows}, 4096] = mm(%{last}, %up{i})",
            f"%b{i}: f32[{rows}, 4096] = relu(%a{i})",
            f"%c{i}: f32[{rows}, 4096] = exp(%b{i})",
            f"%d{i}: f32[{rows}, 4096] = mm(%c{i}, %down{i})",
            f"%e{i}: f32[{rows}, 4096] = add.Tensor(%d{i}, %{last})",
        ]
        last = f"e{i}"
    return "\n".join([*lines, f'return output("output") %{last}']) + "\n"


def test_a_large_graph_has_fewer_variables_than_calls() -> None:
    factor_graph, _ = problem_of(deep_graph(8, "tp=2"))
    calls = [node.name for variable in factor_graph.variables for node in variable.nodes if node.op == "call_function"]
    assert len(calls) == 40
    assert sum(variable.nodes[0].op == "call_function" for variable in factor_graph.variables) == 32  # relu and exp are one


def test_a_plan_that_cannot_fit_is_refused_by_its_bound() -> None:
    factor_graph, unit_costs = problem_of(deep_graph(2, "dp=2,tp=2"))
    with pytest.raises(MemoryLimitError, match=r"needs \d.*B: give more memory, more devices, or a smaller batch$"):
        solve(factor_graph, unit_costs, Goal(memory_limit=1e6))


def test_a_price_on_bytes_finds_a_plan_that_fits() -> None:
    factor_graph, unit_costs = problem_of(deep_graph(4, "dp=4", rows=1 << 12))
    rich, _ = solve(factor_graph, unit_costs, Goal())
    limit = rich.memory * 0.85
    poor, bound = solve(factor_graph, unit_costs, Goal(memory_limit=limit))
    assert poor.memory <= limit * (1 + 1e-6)
    assert rich.objective <= poor.objective and bound <= poor.objective


def test_a_search_that_is_asked_the_same_goes_on_with_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, mesh = parse_graph(deep_graph(4, "dp=2,tp=2"))
    goal, mesh = Goal(gap=0.1), Mesh(mesh.names, mesh.sizes, hardware="h100")
    new = prepare(gm, mesh).explore(goal)
    prepared = prepare(gm, mesh)
    first = next(prepared.solutions(goal))
    with monkeypatch.context() as patched:
        patched.setattr(Dual, "ascend", lambda *_: pytest.fail("it was searched for again"))
        found = prepared.explore(goal)
        assert replace(next(prepared.solutions(goal)), seconds=first.seconds) == first
    assert (found.assignment.strategies, found.assignment.objective) == (new.assignment.strategies, new.assignment.objective)
    assert found.relaxation.dual.bound == new.relaxation.dual.bound
    shorter = prepared.explore(Goal(memory_limit=found.assignment.memory * 0.9, gap=0.1))
    assert shorter.assignment.memory <= found.assignment.memory * 0.9


def test_a_time_limit_that_is_over_gives_a_plan_at_once() -> None:
    factor_graph, unit_costs = problem_of(deep_graph(8, "dp=2,cp=2,tp=2"))
    plan, bound = solve(factor_graph, unit_costs, Goal(time_limit=0.0))
    assert 0.0 < bound <= plan.objective
    assert len(plan.strategies) == len(factor_graph.variables)


def test_where_nothing_fits_yet_no_program_is_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS does not return from a program of a million columns, and a larger one does not follow one that it leaves open."""
    factor_graph, unit_costs = problem_of(deep_graph(1, "dp=2"))
    monkeypatch.setattr(optimize, "fit_memory", lambda *_: True)  # as where nothing that was rounded fits
    monkeypatch.setattr(optimize, "tune", lambda *_: None)
    monkeypatch.setattr(optimize, "PROVABLE", 0)
    monkeypatch.setattr(SearchState, "fits", lambda *_: False)
    goal = Goal(memory_limit=1e12)
    solved: list[Formulation] = []
    proven = [math.inf]

    def counted(self: Formulation, *_: Any, **__: Any) -> tuple[None, float]:
        solved.append(self)
        return None, proven[0]

    monkeypatch.setattr(Formulation, "solve", counted)
    for largest, bound, programs in ((10**6, math.inf, len(optimize.WIDENINGS)), (10**6, 0.0, 1), (0, math.inf, 0)):
        monkeypatch.setattr(optimize, "LARGEST", largest)
        proven[0] = bound
        solved.clear()
        with pytest.raises(MemoryLimitError):
            solve(factor_graph, unit_costs, goal)
        assert len(solved) == programs


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[Formulation]:
    """Record the programs that are solved for a short step."""
    programs: list[Formulation] = []
    solve_program = Formulation.solve

    def recorded(self: Formulation, *given: Any, **more: Any) -> Any:
        programs.append(self)
        return solve_program(self, *given, **more)

    monkeypatch.setattr(Formulation, "solve", recorded)
    return programs


@pytest.mark.parametrize(("large", "steps", "is_left_out"), [(0, math.inf, False), (0, 1.0, True), (10**9, 1.0, False)])
def test_large_programs_that_save_less_than_they_take_are_left_out(
    monkeypatch: pytest.MonkeyPatch, solved: list[Formulation], large: int, steps: float, *, is_left_out: bool
) -> None:
    monkeypatch.setattr(optimize, "LARGE", large)
    solve(*problem_of(random_graph(22, "dp=4")), Goal(gap=0.0, steps=steps))
    assert (len(solved) == 1) == is_left_out  # that of tuning


@pytest.mark.parametrize(("steps", "levels"), [(math.inf, {0, 1, 2}), (1.0, {0})])
def test_strategies_join_a_program_only_where_they_may_save_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, steps: float, levels: set[int]
) -> None:
    factor_graph, unit_costs = problem_of(random_graph(22, "dp=4"))
    joined = set[int]()
    near_bound = tune_multipliers._near_bound

    def counted(state: SearchState, level: int) -> Any:
        joined.add(level)
        return near_bound(state, level)

    monkeypatch.setattr(tune_multipliers, "FAR", 0.0)
    monkeypatch.setattr(tune_multipliers, "_near_bound", counted)
    solve(factor_graph, unit_costs, Goal(gap=0.0, steps=steps))
    assert joined == levels


@pytest.mark.slow
def test_where_nothing_fits_no_short_step_is_looked_for(solved: list[Formulation]) -> None:
    """Each program of the time takes long where no assignment fits; one of the bytes tells."""
    factor_graph, unit_costs = problem_of(deep_graph(4, "dp=4", rows=1 << 12))
    roomy, _ = solve(factor_graph, unit_costs, Goal())
    refused = 0
    for share in (0.3, 0.5, 0.6, 0.7, 0.75, 0.8):
        solved.clear()
        try:
            solve(factor_graph, unit_costs, Goal(roomy.memory * share))
        except MemoryLimitError:
            refused += 1
            assert len(solved) <= 1, share  # that of tuning
    assert refused
