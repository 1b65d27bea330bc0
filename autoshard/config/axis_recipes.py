"""Read `Options(recipe=...)`: one recipe per mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoshard.config.axis_names import usual_recipe
from passes.errors import RecipeError
from passes.ir.mesh import Mesh
from passes.recipes import Recipe, recipe_named

AUTO = "auto"  # search for layouts; before a search, or if none is possible, use `rule_of_thumb`


def recipes_of(recipe: str | Mapping[str, str | None] | None, mesh: Mesh) -> tuple[str | None, ...]:
    """Return one recipe's name (or None) per axis of `mesh`. Raises RecipeError, and MeshError for an unknown axis."""
    if recipe is None:
        return (None,) * mesh.ndim
    if recipe == AUTO:
        return rule_of_thumb(mesh)
    return tuple(None if one is None else one.name for one in _spread(_given(recipe, mesh), mesh))


def rule_of_thumb(mesh: Mesh) -> tuple[str | None, ...]:
    """Return `megatron` for an axis named `tp`, `fsdp_context` for one named `cp` or `context`, `fsdp` for axes with a
    data-parallel name, None for every other.
    """
    return tuple(map(usual_recipe, mesh.names))


def compute_axes(recipes: Sequence[str | None]) -> tuple[int, ...]:
    """Return the axes whose recipes shard parameters while they are used."""
    return tuple(axis for axis, name in enumerate(recipes) if name is not None and recipe_named(name).shards_compute)


def compute_parts(recipes: Sequence[str | None], mesh: Mesh) -> int:
    """Return how many parts the axes make together whose recipes shard parameters while they are used."""
    return math.prod(mesh.sizes[axis] for axis in compute_axes(recipes))


def sequence_parts(recipes: Sequence[str | None], mesh: Mesh) -> int:
    """Return how many parts the axes make together whose recipes split the sequence."""
    pairs = zip(recipes, mesh.sizes, strict=False)
    return math.prod(size for name, size in pairs if name is not None and recipe_named(name).carries_sequence)


def _given(recipe: str | Mapping[str, str | None], mesh: Mesh) -> tuple[Recipe | None, ...]:
    """Return the recipe of each axis as the user wrote it."""
    if isinstance(recipe, str):
        return _joined(recipe, mesh)
    if not isinstance(recipe, Mapping):
        raise RecipeError(
            f"Options(recipe={recipe!r}): give a name such as 'fsdp', or a recipe per axis: {{'dp': 'fsdp'}}"
        )
    chosen: list[Recipe | None] = [None] * mesh.ndim
    for axis, name in recipe.items():
        if name == AUTO:
            raise _for_all_axes(recipe)
        chosen[mesh.index(axis)] = None if name is None else recipe_named(name)
    return tuple(chosen)


def _for_all_axes(recipe: object) -> RecipeError:
    return RecipeError(
        f"Options(recipe={recipe!r}): {AUTO!r} is for all axes at once; give Options(recipe={AUTO!r}), and fix single "
        "placements with params=, inputs= and outputs="
    )


def _joined(recipe: str, mesh: Mesh) -> tuple[Recipe, ...]:
    """Read `"a+b"` on n axes: `b` on the last, `a` on all before it."""
    names = [name.strip() for name in recipe.split("+")]
    if not all(names):
        raise RecipeError(f"recipe {recipe!r} lacks a name before or after '+'; join two, such as 'fsdp+megatron'")
    if AUTO in names:
        raise _for_all_axes(recipe)
    recipes = [recipe_named(name) for name in names]
    if len(recipes) > mesh.ndim:
        raise RecipeError(
            f"recipe {recipe!r} needs {len(recipes)} axes, but the mesh {mesh} has {mesh.ndim}; "
            f"give one recipe per axis, such as {{{mesh.names[0]!r}: {recipes[0].name!r}}}"
        )
    return tuple([recipes[0]] * (mesh.ndim - len(recipes)) + recipes)


def _spread(recipes: tuple[Recipe | None, ...], mesh: Mesh) -> tuple[Recipe | None, ...]:
    """Replace each recipe that combines others by its parts, over the axes that it is given for."""
    found = list(recipes)
    for recipe in dict.fromkeys(recipes):
        if recipe is not None and recipe.spread is not None:
            axes = tuple(axis for axis, one in enumerate(recipes) if one is recipe)
            for axis, part in zip(axes, recipe.spread(mesh, axes), strict=True):
                found[axis] = part
    return tuple(found)
