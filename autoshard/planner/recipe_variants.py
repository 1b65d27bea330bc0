"""Simulate the variants of a recipe that chooses between them by an estimate, and take the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import Evaluation, Folded, evaluate, in_chunks, seeded
from autoshard.planner.memory_limit import plan_evaluation
from autoshard.planner.prediction import memory_of
from autoshard.planner.problem import Problem, Recipes
from autoshard.planner.recomputation import SlowerError
from passes.base import Remark
from passes.errors import RecipeError
from passes.ir.graph import InputRole, Origin
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph
from passes.ir.units import format_seconds
from passes.recipes import recipe_named
from passes.search.solution import Solution
from passes.seed import Seed


def fastest_variant(
    problem: Problem, folded: Folded, recipes: Recipes, solution: Solution | None = None
) -> tuple[Evaluation, tuple[Remark, ...]]:
    """Return the evaluation of the recipes, or of a variant whose step is shorter, with a remark that compares them.

    Plans that fit in memory come first; of others, the smallest. A variant is not simulated if it decides what another
    does, or is proven to be slower than the best so far.
    """
    best = plan_evaluation(problem, folded, recipes, solution)
    variants = tuple(variants_of(recipes, problem.mesh))
    if not variants:
        return best, ()
    name, *others = apart(problem, folded, recipes, variants)
    best, told = replace(best, recipes=name), {name: format_seconds(best.cost.step_time)}
    for variant in others:
        worst = best.cost.step_time if _fits(problem, best) else float("inf")
        try:
            found = evaluate(problem, folded, variant, effort=FULL, worst=worst)
        except SlowerError as slower:
            told[variant] = f"at least {format_seconds(slower.seconds)}"
            continue
        if found.least_time < worst:
            found = in_chunks(problem, found)
        told[variant] = format_seconds(found.cost.step_time)
        best = min(best, found, key=lambda one: _rank(problem, one))
    return best, _compared(problem, told, best.recipes)


def variants_of(recipes: Recipes, mesh: Mesh) -> Iterator[Recipes]:
    """Yield the recipes with a variant on each axis whose recipe has some."""
    axes = zip(recipes, mesh.sizes, strict=True)
    variants = [recipe_named(name).variants if name is not None and size > 1 else () for name, size in axes]
    if any(variants):
        yield from product(*(found or (name,) for found, name in zip(variants, recipes, strict=True)))


def apart(problem: Problem, folded: Folded, recipes: Recipes, variants: Sequence[Recipes]) -> tuple[Recipes, ...]:
    """Return the recipes, named as a variant if one decides the same, and then the variants that decide something else."""
    found = dict[str, Recipes]()
    for variant in variants:
        with suppress(RecipeError):
            found.setdefault(_decided(problem, folded, variant), variant)
    first = found.get(_decided(problem, folded, recipes), recipes)
    return (first, *(one for one in found.values() if one != first))


def _decided(problem: Problem, folded: Folded, recipes: Recipes) -> str:
    return format_graph(seeded(problem, folded, recipes), problem.mesh)


def _rank(problem: Problem, one: Evaluation) -> tuple[float, float]:
    return (0.0, one.cost.step_time) if _fits(problem, one) else (float(one.cost.peak_memory), 0.0)


def _fits(problem: Problem, one: Evaluation) -> bool:
    return one.cost.peak_memory <= problem.options.memory_bytes(memory_of(problem.mesh))


def _compared(problem: Problem, told: Mapping[Recipes, str], chosen: Recipes) -> tuple[Remark, ...]:
    """Return a remark on the steps of variants, unless there is one only."""
    if len(told) == 1:
        return ()
    others = ", ".join(f"{format_recipes(recipes)} {time}" for recipes, time in told.items() if recipes != chosen)
    text = f"{format_recipes(chosen)} is the fastest, by simulated steps of {told[chosen]}; {others}"
    return (Remark(Seed.name, text, Origin(), next(iter(problem.captured.shapes(InputRole.INPUT))).replace(".", "_")),)


def format_recipes(recipes: Recipes) -> str:
    """Return the recipes of all axes as text: `fsdp+context(ring)`."""
    return "+".join(name or "-" for name in recipes)
