"""Check that a recipe's plan fits in the memory that the user allows, and say what would fit."""

from __future__ import annotations

from dataclasses import replace

from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import Evaluation, Folded, evaluate, in_chunks
from autoshard.planner.prediction import memory_of
from autoshard.planner.problem import Problem, Recipes
from autoshard.plans.outcome import Cost
from passes.errors import MemoryLimitError
from passes.ir.units import format_unequal_bytes
from passes.search.solution import Solution

TRIES = 3  # limits that are tried, each the peak at the one before; at the second, peak and limit are nearly always equal


def check_memory(problem: Problem, folded: Folded, evaluation: Evaluation) -> None:
    """Raise MemoryLimitError if `Options(memory_limit=...)` is less than the peak of the recipe's plan.

    The device's own memory is no such limit: a plan can be made to see by how much it is exceeded.
    """
    limit = problem.options.memory_bytes(memory_of(problem.mesh))
    if problem.options.memory_limit is None or evaluation.cost.peak_memory <= limit:
        return
    least = _least(problem, folded, evaluation)
    raise memory_limit_error(
        "the recipe's plan does not fit in",
        limit,
        "it",
        least.cost,
        least.cost.peak_memory,
        "recipe='auto', a larger mesh",
        least.largest(problem.mesh),
    )


def memory_limit_error(
    what: str, limit: int, which: str, cost: Cost, smallest: int, instead: str, largest: tuple[str, ...]
) -> MemoryLimitError:
    """Return the error for a plan with `cost` that needs a limit of `smallest` bytes, not `limit`; `largest` are its values."""
    given, peak = format_unequal_bytes(limit, cost.peak_memory)
    text = (
        f"{what} {given} on a device: {which} has a peak of {peak} ({cost.memory}). Give memory_limit={smallest}, {instead}, a "
        "smaller batch, or mixed_precision. The largest values are made at"
    )
    return MemoryLimitError("\n  ".join((text, *largest)), smallest=smallest)


def _least(problem: Problem, folded: Folded, evaluation: Evaluation) -> Evaluation:
    """Return the evaluation of a plan that fits if its own peak is the limit."""
    for _ in range(TRIES):
        options = replace(problem.options, memory_limit=evaluation.cost.peak_memory)
        again = plan_evaluation(replace(problem, options=options), folded, evaluation.recipes, evaluation.solution)
        if again.cost.peak_memory == evaluation.cost.peak_memory:
            break
        evaluation = again
    return evaluation


def plan_evaluation(
    problem: Problem, folded: Folded, recipes: Recipes, solution: Solution | None = None
) -> Evaluation:
    """Return the evaluation of a plan that was not searched for, with messages in chunks."""
    return in_chunks(problem, evaluate(problem, folded, recipes, solution, effort=FULL))
