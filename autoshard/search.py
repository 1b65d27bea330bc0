"""Which plan is best: every expert's recipe and the solved placement, each judged by the simulator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.constraints import recipes_of
from autoshard.judge import Folded, Judged, judge, seeded
from autoshard.prediction import memory_of
from autoshard.problem import Problem, Recipes
from autoshard.progress import Progress
from passes.errors import InputError, MemoryLimitError, RecipeError
from passes.ir.mesh import Mesh
from passes.ir.plan import Candidate, Search
from passes.search.find import Goal, find
from passes.search.solution import Solution
from passes.solve import Solve

EXPERTS = ("ddp", "zero2", "fsdp", "hsdp", "megatron", "ddp+megatron", "zero2+megatron", "fsdp+megatron", "hsdp+megatron")
SOLVED = "solved"
TRIES = 4  # how often the solver is asked for less memory, where the simulator finds a higher peak than it estimated


@dataclass(frozen=True)
class Choice:
    """The best candidate and how it was found."""

    judged: Judged
    solution: Solution | None  # None: a recipe's
    search: Search


@dataclass(frozen=True)
class _Found:
    judged: Judged
    solution: Solution | None = None


def search(problem: Problem, folded: Folded, progress: Progress) -> Choice:
    """The candidate with the shortest simulated step of those that fit in memory; of equal ones the first.

    Raises MemoryLimitError where none fits: with what takes the memory, and the smallest limit that would do.
    """
    started = time.perf_counter()
    limit = problem.options.memory_bytes(memory_of(problem.mesh))
    progress(SOLVED)
    found = _solved(problem, folded, limit)
    declined = []
    for name, recipes in experts(problem.mesh):
        progress(name)
        try:
            problem.check_batch(recipes)
        except InputError as error:
            declined.append(Candidate(name, None, fits=False, note=str(error)))
            continue
        found[name] = _Found(judge(problem, folded, recipes))
    costs = {name: one.judged.cost for name, one in found.items()}
    fitting = [name for name, cost in costs.items() if cost.peak_memory <= limit]
    if not fitting:
        raise MemoryLimitError(limit, min(costs.values(), key=lambda cost: cost.peak_memory))
    best = min(fitting, key=lambda name: costs[name].step_time)
    solution = found[SOLVED].solution if SOLVED in found else None
    candidates = tuple(Candidate(name, cost, fits=name in fitting) for name, cost in costs.items())
    outcome = Search(
        best,
        (*candidates, *declined),
        limit,
        solution.objective if solution is not None else None,
        solution.bound if solution is not None else None,
        time.perf_counter() - started,
    )
    return Choice(found[best].judged, found[best].solution, outcome)


def experts(mesh: Mesh) -> Iterator[tuple[str, Recipes]]:
    """The recipes that make sense on `mesh`, by name."""
    seen: set[Recipes] = set()
    for name in EXPERTS:
        try:
            recipes = recipes_of(name, mesh)
        except RecipeError:
            continue
        if recipes not in seen:
            seen.add(recipes)
            yield name, recipes


def _solved(problem: Problem, folded: Folded, limit: int) -> dict[str, _Found]:
    """The solved placement; nothing where the solver finds none that could fit."""
    unpinned: Recipes = (None,) * problem.mesh.ndim
    asked, found = limit, {}
    for _ in range(TRIES):
        gm = seeded(problem, folded, unpinned)
        goal = Goal(memory_limit=asked, time_limit=problem.options.time_limit)
        try:
            solution = find(gm, problem.mesh, goal)
        except MemoryLimitError:
            break
        found[SOLVED] = _Found(judge(problem, folded, unpinned, Solve(solution=solution)), solution)
        excess = found[SOLVED].judged.cost.peak_memory - limit
        if excess <= 0:
            break
        asked -= excess
    return found
