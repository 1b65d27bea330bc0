"""Search the variants of a problem, with dims padded or not and its batch padded for some axes or others, for the best plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.config.progress import Progress
from autoshard.planner.candidates import Beside, Choice, compared, search, search_beside
from autoshard.planner.effort import Effort
from autoshard.planner.evaluation import Folded, fold
from autoshard.planner.paddings.batch_padding import gaining_axes, padded_for_fewer_samples
from autoshard.planner.problem import Problem, padded_for
from autoshard.planner.recipe_candidates import Experts
from autoshard.planner.standings import SearchTask
from passes.errors import MemoryLimitError


@dataclass(frozen=True)
class Variant:
    """A variant of a problem, with a name that tells it from the others; without `is_solved`, only recipes are tried."""

    name: str
    problem: Problem
    folded: Folded
    is_solved: bool = True


def folded_variant(problem: Problem, folded: Folded, *, pads: bool) -> Folded:
    """Return the folded graph of `problem` with padded dims and split products or without, given the one with them."""
    return folded if pads or not (folded.is_padded or folded.is_split) else fold(replace(problem, pads=False))


def best_of_variants(
    problem: Problem, folded: Folded, effort: Effort, progress: Progress
) -> tuple[Choice, Problem, Folded]:
    """Search each variant of the problem, and return the best plan with its variant.

    For a later call, such as a last batch that is padded, one search is enough. The time limit is for all searches together.
    """
    task = SearchTask(problem, folded, effort)
    if problem.earlier:
        return search(task, progress), problem, folded
    found, errors = list[tuple[Variant, Beside]](), list[MemoryLimitError]()
    for variant in _variants(problem, folded):
        best = min((_step_time(one) for _, one in found), default=float("inf"))
        try:
            found.append((variant, _searched(variant, replace(task, best_elsewhere=best), progress)))
        except MemoryLimitError as error:
            errors.append(error)
    fitting = [(one.choice, variant) for variant, one in found if one.choice is not None]
    if not fitting:
        raise errors[0]
    best_choice, variant = min(fitting, key=lambda pair: pair[0].evaluation.cost.step_time)
    choice = compared(best_choice, [(other.name, one) for other, one in found if one.choice is not best_choice])
    choice = replace(choice, search=replace(choice.search, seconds=time.perf_counter() - task.started))
    return choice, variant.problem, variant.folded


def _searched(variant: Variant, task: SearchTask, progress: Progress) -> Beside:
    """Search a variant: as long as no plan is known that fits, for one that does."""
    task = replace(task, problem=variant.problem, folded=variant.folded)
    if task.best_elsewhere < float("inf") or not variant.is_solved:
        return search_beside(task, progress, solves=variant.is_solved)
    choice = search(task, progress)
    return Beside(choice.search.candidates, choice.search.least, choice)


def _step_time(found: Beside) -> float:
    return float("inf") if found.choice is None else found.choice.evaluation.cost.step_time


def _variants(problem: Problem, folded: Folded) -> Iterator[Variant]:
    """Yield the problem with padding and split products; if they change the graph, without them; with its batch padded for other
    axes, if each rank has fewer samples by that; and as it is padded for recipes where none of these are.
    """
    named = bool(gaining_axes(problem)) or not (folded.is_padded or folded.is_split)
    what = "padded" if folded.is_padded else "split"
    yield Variant(_name(problem) if named else what, problem, folded)
    if folded.is_padded or folded.is_split:
        yield Variant(f"not {what}", replace(problem, pads=False), folded_variant(problem, folded, pads=False))
    seen = {gaining_axes(problem)}
    for other in padded_for_fewer_samples(problem):
        seen.add(gaining_axes(other))
        yield Variant(_name(other), other, fold(other))
    for _, recipes in Experts(problem, folded):
        other = padded_for(problem, recipes)
        if gaining_axes(other) not in seen:
            seen.add(gaining_axes(other))
            yield Variant(_name(other), other, fold(other), is_solved=False)


def _name(problem: Problem) -> str:
    names = " x ".join(problem.mesh.names[axis] for axis in gaining_axes(problem))
    return f"batch padded for {names}" if names else "batch not padded"
