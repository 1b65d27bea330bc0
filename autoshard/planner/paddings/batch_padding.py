"""Say for which mesh axes a batch is padded that they do not divide: as a recipe splits it, or as a search tries it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from autoshard.planner.problem import Problem, first_batch, undivided
from passes.ir.graph import InputRole
from passes.ir.padding import is_gain


def padded_for_fewer_samples(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with its batch padded for other axes, or for none, where a rank has fewer samples by that than over any
    axes of as few ranks: those with the fewest first.

    There are none where the caller or a constraint says how inputs are split.
    """
    if not may_pad_otherwise(problem):
        return
    held = problem.padded_axes
    least = [(1, _samples(problem, ())), (_ranks(problem, held), _samples(problem, held))]
    found = dict[tuple[int, ...], None]()
    for axes in _subsets(problem):
        ranks, samples = _ranks(problem, axes), _samples(problem, axes)
        if any(fewer <= ranks and best <= samples for fewer, best in least):
            continue
        least.append((ranks, samples))
        padded = undivided(problem, axes)
        if padded or set(axes) & set(held):  # a batch that is padded for no axes, or for others, is not cut on these
            found[padded] = None
    yield from (replace(problem, padded_axes=axes) for axes in reversed(found) if axes != held)


def may_pad_otherwise(problem: Problem) -> bool:
    """Return whether neither the caller nor a constraint says how inputs are split."""
    return problem.batch_axes is None and not problem.options.inputs


def gaining_axes(problem: Problem) -> tuple[int, ...]:
    """Return the axes that the batch is padded for, or none if each rank would have as much as without."""
    axes = tuple(axis for axis in problem.split_when_padded if problem.mesh.sizes[axis] > 1)
    return axes if is_gain(_batch(problem), _ranks(problem, axes)) else ()


def _subsets(problem: Problem) -> list[tuple[int, ...]]:
    """Return all choices of axes that may split the batch, those of the fewest ranks first."""
    axes = [axis for axis in problem.given_axes if problem.mesh.sizes[axis] > 1]
    choices = [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]
    return sorted(choices, key=lambda some: _ranks(problem, some))


def _samples(problem: Problem, axes: tuple[int, ...]) -> int:
    """Return how many samples a rank has of a batch that is split over `axes`, and padded if need be."""
    return -(-_batch(problem) // _ranks(problem, axes))


def _ranks(problem: Problem, axes: tuple[int, ...]) -> int:
    return math.prod(problem.mesh.sizes[axis] for axis in axes)


def _batch(problem: Problem) -> int:
    return first_batch(problem.captured.shapes(InputRole.INPUT))[1]
