"""Solve whole searches with HiGHS alone, none of our bounds: `python -m benchmarks.highs_alone [--case N ...] [--minutes M]`.

HiGHS gets the program of all strategies of a case of the grid, and as long as it takes. Print its step and bound, those of
the search on the same program, and the seconds of both. The search is right if its bound is no longer than HiGHS's step.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options
from autoshard.planner.evaluation import fold, seeded
from autoshard.planner.problem import captured_problem
from autoshard.planner.request import PlanRequest
from benchmarks.grid_cases import CASES, Case
from passes.search.goal import Goal
from passes.search.optimize import optimize
from passes.search.prepared import Prepared, prepare
from passes.search.search_state import SearchState
from passes.search.solvers.restriction import cheapest

USUAL = (7, 10, 32)  # Llama 3 8B on one axis and on two, and a ViT
GOAL = Goal()
ALL = 1 << 30  # strategies per variable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, action="append", help=f"of the grid, from 0; by default {USUAL}")
    parser.add_argument("--minutes", type=float, default=60.0, help="that HiGHS gets at most")
    given = parser.parse_args()
    for number in given.case or USUAL:
        print(compared(CASES[number], given.minutes * 60), flush=True)


def compared(case: Case, seconds: float) -> str:
    """Return the steps, bounds and seconds of the search and of HiGHS alone."""
    prepared = prepared_case(case)
    state, started = SearchState(prepared.transitions, GOAL), time.perf_counter()
    everything = cheapest(state.dual, ALL)
    assignment, bound = state.formulation(everything).solve(GOAL.gap, seconds)
    alone, started = time.perf_counter() - started, time.perf_counter()
    found, proven = list(optimize(SearchState(prepared.transitions, GOAL)))[-1]
    searched = time.perf_counter() - started
    step = "none" if assignment is None else f"{assignment.objective * 1e3:.2f} ms"
    return (
        f"{case}: {everything.size:,} transitions; HiGHS alone {step}, bound {bound * 1e3:.2f} ms, {alone:.0f} s; "
        f"the search {found.objective * 1e3:.2f} ms, bound {proven * 1e3:.2f} ms, {searched:.0f} s"
    )


def prepared_case(case: Case) -> Prepared:
    """Return the folded problem of a case in bfloat16, as the search gets it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model, args = case.build(**case.sizes)
    options = Options(mixed_precision=policy)
    mesh = Mesh(case.mesh, hardware=case.hardware)
    problem = captured_problem(PlanRequest(model, args, {}, mesh, options).checked())
    return prepare(seeded(problem, fold(problem), (None,) * mesh.ndim), mesh)


if __name__ == "__main__":
    main()
