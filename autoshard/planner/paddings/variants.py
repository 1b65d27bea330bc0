"""Search the variants of a problem, with dims padded or not and its batch padded for some axes or others, for the best plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autoshard.config.progress import Progress
from autoshard.planner.candidates import Beside, Choice, compared, search, search_beside
from autoshard.planner.effort import Effort
from autoshard.planner.evaluation import Folded, folded_as
from autoshard.planner.paddings.batch_padding import gaining_axes, may_pad_otherwise, padded_for_fewer_samples
from autoshard.planner.problem import Problem, dims_padded_as, padded_for
from autoshard.planner.recipe_candidates import Experts, is_padded_alike
from autoshard.planner.standings import SOLVED, SearchTask
from passes.errors import MemoryLimitError
from passes.ir.mesh import Mesh

MOST_UNDERPRICED = 0.05  # part of a step: where a plan is simulated slower by more, prices with other paddings may be better
MOST_AXES = 2  # of a mesh, for which dims are padded for any of them


@dataclass(frozen=True)
class Variant:
    """A variant of a problem, with a name that tells it from the others; without `is_solved`, only recipes are tried."""

    name: str
    problem: Problem
    folded: Folded
    is_solved: bool = True


def best_of_variants(
    problem: Problem, folded: Folded, effort: Effort, progress: Progress
) -> tuple[Choice, Problem, Folded]:
    """Search each variant of the problem, and return the best plan with its variant.

    For a later call, such as a last batch that is padded, one search is enough, with dims padded as in the first plan. The time
    limit is for all searches together.
    """
    task = SearchTask(problem, folded, effort)
    if problem.earlier:
        problem = replace(dims_padded_as(problem, problem.earlier[0]), pads=True)
        folded = folded_as(problem, folded)
        return search(replace(task, problem=problem, folded=folded), progress), problem, folded
    found, errors = list[tuple[Variant, Beside]](), list[MemoryLimitError]()
    for variant in _variants(problem, folded, found):
        best = min((one for _, one in found), key=_step_time, default=None)
        if best is not None:
            task = replace(task, best_elsewhere=_step_time(best), underpriced_elsewhere=_underpriced(best))
        try:
            found.append((variant, _searched(variant, task, progress)))
        except MemoryLimitError as error:
            errors.append(error)
    fitting = [(variant, one) for variant, one in found if one.choice is not None]
    if not fitting:
        raise min(errors, key=lambda error: error.smallest)
    variant, fastest = min(fitting, key=lambda pair: _step_time(pair[1]))
    choice = compared(fastest, [(other.name, one) for other, one in found if other is not variant])
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


def _underpriced(found: Beside) -> float:
    """Return the simulated step as a multiple of the price of the solver's plan; 1 if a recipe is faster than that."""
    chosen = None if found.choice is None else found.choice.search
    if chosen is None or chosen.chosen != SOLVED or chosen.step_time is None or chosen.objective is None:
        return 1.0
    return min(1 + MOST_UNDERPRICED, max(1.0, chosen.step_time / chosen.objective))


def _variants(problem: Problem, folded: Folded, found: Sequence[tuple[Variant, Beside]]) -> Iterator[Variant]:
    """Yield the problem with padding and split products; if they change the graph, without them; with dims padded for other axes,
    its batch padded and not; with its batch padded for other axes, dims padded as in the best of these and not; and as it is
    padded for each recipe where none of these are. `found` grows by what is found of each.
    """
    what = "padded" if folded.is_padded else "split"
    is_plain = not (folded.is_padded or folded.is_split)
    own = _name(problem) if gaining_axes(problem) else "not padded" if is_plain else what
    searched = [Variant(own, problem, folded)]
    if not is_plain:
        plain = replace(problem, pads=False)
        searched.append(Variant(f"not {what}", plain, folded_as(plain, folded)))
    searched += _with_dims_padded_for_other_axes(searched)
    yield from searched
    best = min(found, key=lambda pair: _step_time(pair[1]))[0].problem if found else problem
    others = list(_with_batch_padded_for_other_axes(best, searched))
    searched += others
    yield from others
    for name, recipes in Experts(problem, folded):
        if not any(is_padded_alike(one.problem, one.folded, recipes) for one in searched):
            other = padded_for(problem, recipes)
            searched.append(Variant(f"padded for {name}", other, folded_as(other, folded), is_solved=False))
            yield searched[-1]


def _with_dims_padded_for_other_axes(searched: Sequence[Variant]) -> Iterator[Variant]:
    """Yield the first of the variants with dims padded for each axis alone, and for both together: with its batch as it is there,
    and not padded.

    A dim that is padded for several axes together can be sharded on all of them or on none. On three axes and more, where a
    search takes long, there are none.
    """
    problem = replace(searched[0].problem, pads=True)
    mesh, own = problem.mesh, problem.padded_axes
    shared = [axis for axis in range(mesh.ndim) if mesh.sizes[axis] > 1]
    choices = [some for count in range(1, len(shared) + 1) for some in combinations(shared, count)]
    batches = {(): ", batch not padded", own: ""} if may_pad_otherwise(problem) else {own: ""}
    others = [
        (f"padded for {_named(mesh, dims)}{said}", replace(problem, compute_axes=dims, padded_axes=batch))
        for batch, said in batches.items()
        for dims in choices
    ]
    yield from _unlike(searched, others if len(shared) <= MOST_AXES else ())


def _with_batch_padded_for_other_axes(best: Problem, searched: Sequence[Variant]) -> Iterator[Variant]:
    """Yield the best problem with its batch padded for other axes, if each rank has fewer samples by that: with dims as they are
    there, and not padded.
    """
    best = best if best.pads else replace(best, pads=True, compute_axes=())
    others = [
        (f"{_name(other)}{said}", replace(other, compute_axes=dims))
        for dims, said in {best.compute_axes: "", (): ", dims not padded"}.items()
        for other in padded_for_fewer_samples(best)
    ]
    yield from _unlike(searched, others)


def _unlike(searched: Sequence[Variant], others: Iterable[tuple[str, Problem]]) -> Iterator[Variant]:
    """Yield named problems as variants where padding gives another graph than all variants have."""
    graphs = {variant.folded.text for variant in searched}
    for name, problem in others:
        folded = folded_as(problem, searched[0].folded)
        if folded.text not in graphs:
            graphs.add(folded.text)
            yield Variant(name, problem, folded)


def _name(problem: Problem) -> str:
    names = _named(problem.mesh, gaining_axes(problem))
    return f"batch padded for {names}" if names else "batch not padded"


def _named(mesh: Mesh, axes: Sequence[int]) -> str:
    return " x ".join(mesh.names[axis] for axis in axes)
