"""Compare the solver's model of a step with the simulator: `python -m benchmarks.agreement [MODEL ...] [--case N]`.

`--without NAME` leaves out a recipe.

Print for each case of the grid the ratio of objective to simulated step, for the solver's own plan and for each recipe, and
the ratio of the solver's bound to the fastest simulated step. A bound whose ratio is above 1 does not hold for the simulator.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import MemoryLimitError, Mesh, Options
from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import fold, in_chunks
from autoshard.planner.paddings.batch_padding import gaining_axes
from autoshard.planner.problem import captured_problem, padded_for
from autoshard.planner.recipe_candidates import Experts
from autoshard.planner.request import PlanRequest
from autoshard.planner.solver_candidate import solve
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from benchmarks.grid_cases import CASES, Case
from benchmarks.recipe_costs import estimate
from passes.search.prepared import Prepared

GOAL = 0.05  # of the simulated step: the model should be no further from it


@dataclass(frozen=True)
class Row:
    """A plan's step in seconds: `objective` by the solver's model, `step` as simulated."""

    name: str
    objective: float
    step: float
    fits: bool

    @property
    def ratio(self) -> float:
        """Return the objective as a part of the simulated step."""
        return self.objective / self.step

    def __str__(self) -> str:
        fits = "" if self.fits else ", does not fit"
        figures = f"model {self.objective * 1e3:8.1f} ms, simulated {self.step * 1e3:8.1f} ms: {self.ratio:.3f}"
        return f"  {self.name:18} {figures}{fits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names of models; by default all")
    parser.add_argument("--case", type=int, action="append", help="the number of a case, from 0; by default all")
    parser.add_argument("--without", action="append", default=[], help="the name of a recipe that is left out")
    given = parser.parse_args()
    ratios: list[float] = []
    own: list[float] = []
    gains: list[float] = []
    for number, case in enumerate(CASES):
        is_named = not given.models or case.build.__name__ in given.models
        if not is_named or (given.case is not None and number not in given.case):
            continue
        try:
            rows, bound = compared(case, given.without)
        except MemoryLimitError as error:
            print(f"{case}: {error}", flush=True)
            continue
        least = min(row.step for row in rows)
        print(f"{case}: bound {'none' if bound is None else f'{bound / least:.3f} of the fastest'}", flush=True)
        print("\n".join(map(str, rows)), flush=True)
        ratios += [row.ratio for row in rows if row.fits]
        solved, *recipes = rows
        own.append(solved.ratio)
        gains += [solved.step / min(row.step for row in recipes if row.fits)] if any(row.fits for row in recipes) else []
    if ratios:
        near = sum(abs(ratio - 1) <= GOAL for ratio in ratios)
        figures = f"{min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}"
        print(f"{len(ratios)} plans that fit: {figures}; {near} within {GOAL:.0%}")
        print(f"of these, {sum(abs(ratio - 1) <= GOAL for ratio in own)} of {len(own)} of the solver within {GOAL:.0%}")
    if gains:
        figures = f"{min(gains):.3f} to {max(gains):.3f}, median {statistics.median(gains):.3f}"
        print(f"the solver's step, of the best recipe's: {figures}")


def compared(case: Case, without: Collection[str] = ()) -> tuple[list[Row], float | None]:
    """Return a row for the solver's own plan and each recipe of a case, and the solver's bound in seconds."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model, args = case.build(**case.sizes)
    mesh = Mesh(case.mesh, hardware=case.hardware)
    problem = captured_problem(PlanRequest(model, args, {}, mesh, Options(mixed_precision=policy)).checked())
    task = SearchTask(problem, fold(problem), FULL)
    solved = solve(task, Standings(task))
    assert solved.answer is not None and solved.prepared is not None
    found = in_chunks(problem, solved.answer.evaluation)
    rows = [Row(SOLVED, solved.answer.solution.objective, found.cost.step_time, task.fits(found))]
    return [*rows, *_recipes(task, Experts(problem, task.folded), solved.prepared, without)], solved.bound


def _recipes(task: SearchTask, experts: Experts, prepared: Prepared, without: Collection[str]) -> Iterator[Row]:
    """Yield a row for each recipe that pads the batch as the solver does, with dims padded as the solver pads them."""
    for name, recipes in experts:
        if name in without or gaining_axes(padded_for(task.problem, recipes)) != gaining_axes(task.problem):
            continue
        objective = estimate(experts, recipes, prepared)
        found = in_chunks(task.problem, task.evaluate(recipes))
        yield Row(name, objective, found.cost.step_time, task.fits(found))


if __name__ == "__main__":
    main()
