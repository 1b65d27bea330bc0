"""Choose the best plan by simulation: the solver's, or that of an expert's recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.config.options import Options
from autoshard.config.progress import Progress
from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import Evaluation, in_chunks
from autoshard.planner.memory_limit import memory_limit_error
from autoshard.planner.recipe_candidates import QUICKLY, decline_recipes, try_recipes
from autoshard.planner.recomputation import SlowerError, memory_budget_of
from autoshard.planner.solver_candidate import ANY, Solved, ask, least_of_kernels, solve, solve_for_least
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from autoshard.plans.outcome import Candidate, Cost, Search
from passes.cost.scheduling.best_schedule import MOST_SAVED_APART
from passes.errors import CompilerError, MemoryLimitError
from passes.search.model.axis_groups import format_axis_groups
from passes.search.prepared import Prepared
from passes.search.solution import Solution

AGAIN = "layers computed again in the backward"
REPRICED = "solved again with dearer messages"
KEPT = "slower though nothing is computed again: not made to fit"
UNTUNED = "not fully tuned"  # in buckets and chunks, as it is too slow to win
SECONDS = 30.0  # at most of the search for the smallest limit: it is for a message, which may say a larger one
STEP = 0.05  # part of a memory limit: step of the search for the smallest limit, coarse because each step is a solve


@dataclass(frozen=True)
class Choice:
    """The best candidate and how it was found."""

    evaluation: Evaluation
    solution: Solution | None  # None: a recipe's
    search: Search
    prepared: Prepared | None  # the problem that was solved; None: there was no time for it


@dataclass(frozen=True)
class Beside:
    """The candidates of a search beside another, the best of them, and seconds that no plan is simulated faster than (None: not
    known).
    """

    candidates: tuple[Candidate, ...]
    least: float | None
    choice: Choice | None = None
    is_solved: bool = True  # False: only recipes were tried, or could win

    @property
    def bounds(self) -> tuple[float | None, ...]:
        """Return the bound by the solver's model; nothing of plans that were not searched, as they are proven to be slower or
        to be no better than others.
        """
        if not self.is_solved or (self.choice is None and self.least is not None):
            return ()
        return (None if self.choice is None else self.choice.search.bound,)


def search(task: SearchTask, progress: Progress) -> Choice:
    """Return the candidate with the shortest simulated step of those that fit in memory; if nearly equal, the `preferred`.

    Recipes that are proven to be slower, or not to fit, are not simulated, unless the effort is to try all; nor are any
    once the time limit is over and there is a plan that fits. Raises MemoryLimitError if nothing fits, with what takes
    the memory and the smallest limit that would do. A candidate that fails because of a bug in autoshard is left out
    with a warning; if all do, raises CompilerError.
    """
    standings = Standings(task)
    solved = _entered(task, standings, progress)
    if standings.best is None:
        with standings.attempt(SOLVED):
            solved = solve_for_least(task, standings, solved)
    if standings.smallest is None:
        raise CompilerError("no candidate plan could be made: the first failure is above") from standings.failures[0]
    if standings.best is None:
        raise _too_small(task, standings.smallest, solved)
    return _choice(task, standings, solved, _cut(task, standings))


def search_beside(task: SearchTask, progress: Progress, *, solves: bool) -> Beside:
    """Search as `search` does for a plan that may be faster than the best elsewhere; without `solves`, among recipes only.

    Nothing is simulated where all plans are proven to be slower, unless the effort is to try all. Raises MemoryLimitError if
    nothing fits, here or elsewhere.
    """
    standings, solved, least = Standings(task), Solved(), None
    is_late, is_asked = task.left <= 0, solves or task.effort.recipes != "needed"
    if not is_late:
        with standings.attempt(SOLVED):
            least = least_of_kernels(task)
    if not is_asked or is_late:
        _decline(standings, task.late if is_late else QUICKLY, solves=solves)
    elif least is not None and least > task.best_elsewhere and task.effort.recipes != "all":
        _decline(standings, str(SlowerError(least)), solves=solves)
    elif solves:
        solved = _entered(task, standings, progress)
    else:
        try_recipes(task, standings, solved, progress)
    if standings.best is None and standings.smallest is not None and task.best_elsewhere == float("inf"):
        raise _too_small(task, standings.smallest, solved)
    if standings.best is None:
        return Beside(_candidates(task, standings, solved, float("inf")), least, is_solved=solves)
    choice = _choice(task, standings, solved, _cut(task, standings))
    return Beside(choice.search.candidates, least, choice, is_solved=solves and not solved.is_beaten)


def _entered(task: SearchTask, standings: Standings, progress: Progress) -> Solved:
    """Enter the solver's plan and the recipes."""
    progress(SOLVED)
    solved = Solved()
    with standings.attempt(SOLVED):
        solved = solve(task, standings)
    try_recipes(task, standings, solved, progress)
    return solved


def _decline(standings: Standings, note: str, *, solves: bool) -> None:
    if solves:
        standings.decline(SOLVED, note)
    decline_recipes(standings, note)


def compared(best: Beside, others: Sequence[tuple[str, Beside]]) -> Choice:
    """Return the best choice with the candidates of other searches, and what holds for the plans of all.

    Of candidates whose names are taken, and of the solver's, only the one that was chosen is added, or if there is none, one that
    was not; to its own name that of its search.
    """
    assert best.choice is not None
    found = {one.name: one for one in best.candidates}
    for search_name, other in others:
        chosen = SOLVED if other.choice is None else other.choice.search.chosen
        for one in other.candidates:
            if one.name != SOLVED and one.name not in found:
                found[one.name] = one
            elif one.name == chosen or not any(name.startswith(SOLVED) for name in found):
                name = f"{one.name}, {search_name}"
                found[name] = replace(one, name=name)
    searches = [best, *(other for _, other in others)]
    bounds = [bound for one in searches for bound in one.bounds]
    least = [one.least for one in searches]
    searched = replace(best.choice.search, candidates=tuple(found.values()), bound=_least(bounds), least=_least(least))
    return replace(best.choice, search=searched)


def _least(bounds: Sequence[float | None]) -> float | None:
    """Return the least of the bounds; None if one is not known."""
    known = [bound for bound in bounds if bound is not None]
    return min(known, default=None) if len(known) == len(bounds) else None


def _cut(task: SearchTask, standings: Standings) -> str:
    """Simulate chunked messages for the candidates that they could make the best, or for all in a table of all, and return the
    best then."""
    best, evaluated = standings.best, standings.evaluated
    assert best is not None
    fitting = [name for name, one in evaluated.items() if task.fits(one)]
    for name in sorted(fitting, key=lambda name: evaluated[name].cost.step_time):
        if name == best or task.effort.recipes == "all" or evaluated[name].least_time < standings.best_time:
            evaluated[name] = in_chunks(task.problem, evaluated[name])
            best = standings.best or best
    while evaluated[best].chunking is not None:
        evaluated[best] = in_chunks(task.problem, evaluated[best])
        best = standings.best or best
    return best


def _choice(task: SearchTask, standings: Standings, solved: Solved, best: str) -> Choice:
    limit, solution = task.limit, None if solved.answer is None else solved.answer.solution
    step = standings.evaluated[best].cost.step_time
    return Choice(
        standings.evaluated[best],
        solution if best == SOLVED else None,
        Search(
            best,
            _candidates(task, standings, solved, step),
            limit,
            solved.objective,
            solved.bound,
            solved.least,
            time.perf_counter() - task.started,
        ),
        solved.source,
    )


def _candidates(task: SearchTask, standings: Standings, solved: Solved, best_time: float) -> tuple[Candidate, ...]:
    """Return what was evaluated, and what was left out; `best_time` is the step of the best, in seconds."""
    evaluated = (
        Candidate(name, one.cost, fits=task.fits(one), note="; ".join(_notes(task, solved, name, one, best_time)))
        for name, one in standings.evaluated.items()
    )
    return (*evaluated, *standings.declined)


def _notes(task: SearchTask, solved: Solved, name: str, one: Evaluation, best_time: float) -> Iterator[str]:
    """Yield what a candidate traded for its result; `best_time` is the step of the best, in seconds."""
    answer = solved.answer if name == SOLVED else None
    if answer is not None and (axes := format_axis_groups(answer.source.skeleton.axis_groups, task.problem.mesh)):
        yield f"{axes} used alike"
    if answer is not None and answer.source.corrected is not None:
        yield REPRICED
    is_auto = task.problem.options.recompute == "auto" and task.problem.training
    if one.recomputation is not None:
        yield AGAIN
    elif is_auto and not task.fits(one) and one.cost.step_time >= best_time:
        yield KEPT
    if task.fits(one) and _is_untuned(task, name, one, best_time):
        yield UNTUNED


def _is_untuned(task: SearchTask, name: str, one: Evaluation, best_time: float) -> bool:
    """Return whether a candidate may be faster where it is planned by its name, but not as fast as the best."""
    best_time = min(best_time, task.best_elsewhere)
    is_left = name != SOLVED and one.cost.step_time > best_time * (1 + MOST_SAVED_APART)
    return one.chunking is not None or (is_left and task.effort.recipes != "all")


def _too_small(task: SearchTask, least: Evaluation, solved: Solved) -> MemoryLimitError:
    smallest, cost, in_time = _smallest_limit(task, least.cost, solved.prepared)
    which = "the one that takes least" if in_time else "of those found in time, the one that takes least"
    largest = least.largest(task.problem.mesh)
    return memory_limit_error("no plan fits in", task.limit, which, cost, smallest, "a larger mesh", largest)


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
