"""Plans that are simulated slower than they are priced are solved for again, with the prices of their messages corrected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autoshard.planner import candidates, solver_candidate
from autoshard.planner.solver_candidate import Answer
from autoshard.planner.standings import SOLVED, Standings
from passes.search.goal import Goal
from passes.search.solution import Solution, strategies_of
from passes.search.solvers.evaluate import evaluate
from tests.search.test_agreement import wide


def test_a_plan_whose_prices_were_corrected_costs_what_was_simulated() -> None:
    """Other plans cost as much as before where they have no message in common with it, and no plan costs less."""
    _, found = wide()
    solution = list(found.solutions(Goal()))[-1]
    strategies = strategies_of(found.graph, found.skeleton, found.factor_graph, solution)
    dearer = found.corrected_by(solution, 1e-3)
    before, after = (evaluate(one.transitions, strategies, keeps=0.0) for one in (found, dearer))
    assert before is not None and after is not None
    assert after.objective == pytest.approx(before.objective + 1e-3, rel=1e-6)
    assert found.price(solution) == pytest.approx(solution.objective, rel=1e-6)
    assert list(dearer.solutions(Goal()))[-1].objective >= solution.objective
    assert found.corrected is None, "the prices of the problem itself are as before"


@pytest.mark.parametrize(("waited", "own"), [(4e-4, 4e-4), (2e-3, 1e-3)])
def test_a_message_that_the_device_waits_for_is_dearer_by_that_first(waited: float, own: float) -> None:
    _, found = wide()
    solution = list(found.solutions(Goal()))[-1]
    taken = found.transitions._taken(strategies_of(found.graph, found.skeleton, found.factor_graph, solution))
    numbers = list(dict.fromkeys(number for number, _ in taken))
    one = next(number for number in numbers if found.factor_graph.values[number].hides)
    dearer = found.corrected_by(solution, 1e-3, {found.factor_graph.values[one].name: waited, "no message": 1.0}).transitions
    more = [float((dearer.terms[number].loads - found.transitions.terms[number].loads)[0].sum()) for number in numbers]
    assert sum(more) == pytest.approx(1e-3, rel=1e-6)
    assert own <= more[numbers.index(one)] <= own + (1e-3 - own) * 0.99


def test_plans_that_were_priced_too_low_are_solved_again_at_corrected_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The better plan as simulated is kept; its price and the bound are by the first prices."""
    task, first = wide()
    steps, bounds = [], []
    for mispriced in (float("inf"), solver_candidate.MISPRICED):
        monkeypatch.setattr(solver_candidate, "MISPRICED", mispriced)
        solved = solver_candidate.solve(task, Standings(task))
        assert solved.answer is not None
        steps.append(solved.answer.evaluation.cost.step_time)
        bounds.append(solved.proven)
    notes = list(candidates._notes(task, solved, SOLVED, solved.answer.evaluation, steps[1]))
    assert (candidates.REPRICED in notes) == (solved.answer.source.corrected is not None)
    assert steps[1] < 0.97 * steps[0] and bounds[0] is not None and bounds[1] == bounds[0]
    best = solved.answer.solution
    assert solved.answer is not None and best.objective == pytest.approx(first.price(best), rel=1e-6)
    again = replace(best, objective=best.objective + 1e-3)
    dearer = replace(solved.answer, source=first.corrected_by(best, 1e-3), solution=again)
    assert dearer.source.price(best) == pytest.approx(best.objective + 1e-3, rel=1e-6)
    assert solver_candidate._at_first_prices(dearer, first).solution.objective == pytest.approx(best.objective, rel=1e-6)
    monkeypatch.setattr(solver_candidate, "WORTHWHILE", steps[0] - 0.9 * steps[1])
    left = solver_candidate.solve(task, Standings(task)).answer
    assert left is not None and left.evaluation.cost.step_time == steps[0], "too little is promised"
    monkeypatch.undo()
    beside = replace(task, best_elsewhere=bounds[0])  # with another padding: as fast as any plan is priced here
    as_priced = solver_candidate.solve(beside, Standings(beside)).answer
    assert as_priced is not None and as_priced.evaluation.cost.step_time > 1.02 * steps[1], "nothing is solved again for it"
    beside = replace(task, underpriced_elsewhere=steps[0] / bounds[0])  # with another padding, the best is simulated as slow
    as_slow = solver_candidate.solve(beside, Standings(beside)).answer
    assert as_slow is not None and as_slow.evaluation.cost.step_time == steps[0], "a plan priced as low is expected to be as slow"


def test_prices_that_are_far_off_are_neither_proven_nor_corrected_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose prices will be corrected is not proven, and corrected prices that gain nothing are the last."""
    task, prepared = wide()
    answer = solver_candidate.ask(task, Standings(task), prepared, (), proves=False)
    assert answer is not None
    searched: list[bool] = []

    def longer() -> Iterator[Solution]:
        searched.append(True)
        yield answer.solution

    assert solver_candidate._improved(task, Standings(task), answer, longer()) == answer and searched
    searched.clear()
    overrun = 1.01 * solver_candidate.FAR_OFF * answer.solution.objective
    monkeypatch.setattr(solver_candidate, "_overrun", lambda *_: overrun)
    assert solver_candidate._improved(task, Standings(task), answer, longer()) is answer and not searched
    asked: list[float | None] = []

    def ask(*_: Any, gap: float, proves: bool) -> Answer:
        asked.append(gap)
        return answer

    monkeypatch.setattr(solver_candidate, "_runners_up", lambda *_: ())
    monkeypatch.setattr(solver_candidate, "ask", ask)
    monkeypatch.setattr(solver_candidate, "_may_be_faster", lambda *_: True)
    solver_candidate._repriced(task, Standings(task), answer, 0.0)
    assert asked == [solver_candidate.MISPRICED] * 2
