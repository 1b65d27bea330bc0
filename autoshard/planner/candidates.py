"""Choose the best plan by simulation: the solver's, or that of an expert's recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.config.options import Options
from autoshard.config.progress import Progress
from autoshard.planner.effort import FULL, Effort
from autoshard.planner.evaluation import Evaluation, Folded, in_chunks
from autoshard.planner.memory_limit import memory_limit_error
from autoshard.planner.problem import Problem
from autoshard.planner.recipe_candidates import try_recipes
from autoshard.planner.recomputation import memory_budget_of
from autoshard.planner.solver_candidate import ANY, Solved, ask, solve, solve_for_least
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from autoshard.plans.outcome import Candidate, Cost, Search
from passes.errors import CompilerError, MemoryLimitError
from passes.ir.units import format_bytes
from passes.search.model.axis_groups import format_axis_groups
from passes.search.prepared import Prepared
from passes.search.solution import Solution

AGAIN = "layers computed again in the backward"
APART = "solved again with links in use at different times"
KEPT = "slower though nothing is computed again: not made to fit"
SECONDS = 30.0  # at most of the search for the smallest limit: it is for a message, which may say a larger one
STEP = 0.05  # part of a memory limit: step of the search for the smallest limit, coarse because each step is a solve


@dataclass(frozen=True)
class Choice:
    """The best candidate and how it was found."""

    evaluation: Evaluation
    solution: Solution | None  # None: a recipe's
    search: Search
    prepared: Prepared | None  # the problem that was solved; None: there was no time for it


def search(problem: Problem, folded: Folded, effort: Effort, progress: Progress) -> Choice:
    """Return the candidate with the shortest simulated step of those that fit in memory; if nearly equal, the `preferred`.

    Recipes that are proven to be slower, or not to fit, are not simulated, unless the effort is to try all; nor are any
    once the time limit is over and there is a plan that fits. Raises MemoryLimitError if nothing fits, with what takes
    the memory and the smallest limit that would do. A candidate that fails because of a bug in autoshard is left out
    with a warning; if all do, raises CompilerError.
    """
    task = SearchTask(problem, folded, effort)
    standings = Standings(task)
    progress(SOLVED)
    solved = Solved()
    with standings.attempt(SOLVED):
        solved = solve(task, standings)
    try_recipes(task, standings, solved, progress)
    if standings.best is None:
        with standings.attempt(SOLVED):
            solved = solve_for_least(task, standings, solved)
    if standings.smallest is None:
        raise CompilerError("no candidate plan could be made: the first failure is above") from standings.failures[0]
    if standings.best is None:
        raise _too_small(task, standings.smallest, solved)
    return _choice(task, standings, solved, _cut(task, standings))


def compared(best: Choice, others: Sequence[tuple[str, Choice]]) -> Choice:
    """Return the best choice with those of other searches among its candidates; the name of each search is added to theirs."""
    added = [Candidate(f"{one.search.chosen}, {name}", one.evaluation.cost, fits=True) for name, one in others]
    choices = [best, *(one for _, one in others)]
    bounds, least = ([getattr(one.search, name) for one in choices] for name in ("bound", "least"))
    searched = replace(
        best.search,
        candidates=(*best.search.candidates, *added),
        bound=None if None in bounds else min(bounds),
        least=None if None in least else min(least),
        seconds=sum(one.search.seconds for one in choices),
    )
    return replace(best, search=searched)


def _cut(task: SearchTask, standings: Standings) -> str:
    """Simulate chunked messages for the candidates that they could make the best, and return the best then."""
    best, evaluated = standings.best, standings.evaluated
    assert best is not None
    fitting = [name for name, one in evaluated.items() if task.fits(one)]
    for name in sorted(fitting, key=lambda name: evaluated[name].cost.step_time):
        if name == best or evaluated[name].least_time < standings.best_time:
            evaluated[name] = in_chunks(task.problem, evaluated[name])
            best = standings.best or best
    while evaluated[best].chunking is not None:
        evaluated[best] = in_chunks(task.problem, evaluated[best])
        best = standings.best or best
    return best


def _choice(task: SearchTask, standings: Standings, solved: Solved, best: str) -> Choice:
    limit, solution = task.limit, None if solved.answer is None else solved.answer.solution
    step = standings.evaluated[best].cost.step_time
    candidates = [
        Candidate(name, one.cost, fits=task.fits(one), note="; ".join(_notes(task, solved, name, one, step)))
        for name, one in standings.evaluated.items()
    ]
    return Choice(
        standings.evaluated[best],
        solution if best == SOLVED else None,
        Search(
            best,
            (*candidates, *standings.declined),
            limit,
            solved.objective,
            solved.bound,
            solved.least,
            time.perf_counter() - task.started,
        ),
        solved.source,
    )


def _notes(task: SearchTask, solved: Solved, name: str, one: Evaluation, best_time: float) -> Iterator[str]:
    """Yield what a candidate traded for its result; `best_time` is the step of the best, in seconds."""
    answer = solved.answer if name == SOLVED else None
    if answer is not None and (axes := format_axis_groups(answer.source.skeleton.axis_groups, task.problem.mesh)):
        yield f"{axes} used alike"
    if answer is not None and answer.source.node_costs.unit_costs.hiding != task.problem.hiding:
        yield APART
    is_auto = task.problem.options.recompute == "auto" and task.problem.training
    if one.recomputation is not None:
        yield AGAIN
    elif is_auto and not task.fits(one) and one.cost.step_time >= best_time:
        yield KEPT


def _too_small(task: SearchTask, least: Evaluation, solved: Solved) -> MemoryLimitError:
    smallest, cost, in_time = _smallest_limit(task, least.cost, solved.prepared)
    which = "the one that takes least" if in_time else "of those found in time, the one that takes least"
    what = f"no plan fits in {format_bytes(task.limit)} on a device: {which}"
    return memory_limit_error(what, cost, smallest, "a larger mesh", least.largest(task.problem.mesh))


def _with_time(options: Options, started: float) -> Options:
    """Return options that let what began at `started` take `SECONDS` more."""
    limit = time.perf_counter() - started + SECONDS
    return replace(options, time_limit=limit if options.time_limit is None else min(limit, options.time_limit))


def _smallest_limit(task: SearchTask, cost: Cost, prepared: Prepared | None) -> tuple[int, Cost, bool]:
    """Return the smallest memory limit with a plan that fits, to a step of `STEP`, the cost of that plan, and whether the
    search was not cut short.

    The smallest candidate, with `cost`, fits in its own peak, since every limit tries all candidates again. Limits
    between that and the given one, which is too small, are given to the solver: each halves their ratio.
    """
    largest, least = task.limit, cost.peak_memory
    task = replace(task, problem=replace(task.problem, options=_with_time(task.problem.options, task.started)))
    while prepared is not None and largest + 1 < least and largest < (1 - STEP) * least and task.left > 0:
        limit = max(largest + 1, math.isqrt(largest * least))
        problem = replace(task.problem, options=replace(task.problem.options, memory_limit=limit))
        lowered, curve = replace(task, problem=problem, effort=FULL), memory_budget_of(problem, prepared).recomputation
        answer = ask(lowered, Standings(lowered), prepared, curve, gap=ANY)
        if answer is None or not lowered.fits(answer.evaluation):
            largest = limit
        else:
            least, cost = limit, answer.evaluation.cost
    return least, cost, prepared is None or task.left > 0
