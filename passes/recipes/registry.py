"""Recipes by name, in the order in which `recipe="auto"` tries them."""

from __future__ import annotations

import difflib

from passes.errors import RecipeError
from passes.recipes.context_parallel import CONTEXT, CONTEXT_WAYS, FSDP_CONTEXT
from passes.recipes.ddp import DDP
from passes.recipes.fsdp import FSDP
from passes.recipes.hsdp import HSDP
from passes.recipes.megatron import MEGATRON
from passes.recipes.recipe import Recipe
from passes.recipes.zero2 import ZERO2

_RECIPES = {
    recipe.name: recipe for recipe in (FSDP, ZERO2, DDP, HSDP, MEGATRON, CONTEXT, *CONTEXT_WAYS, *FSDP_CONTEXT)
}


def register_recipe(recipe: Recipe) -> None:
    """Make `recipe` known by its name, to options and to the search. Raises RecipeError if the name is taken."""
    if _RECIPES.setdefault(recipe.name, recipe) != recipe:
        raise RecipeError(f"there is a recipe {recipe.name!r} already: {_RECIPES[recipe.name].summary}; choose another name")


def registered_recipes() -> tuple[Recipe, ...]:
    """Return all recipes, in the order of their registration."""
    return tuple(_RECIPES.values())


# What users write, and what they mean; ZeRO-3 is `fsdp`, and `zero2` saves what ZeRO-1 does (Rajbhandari et al. 2020).
_STAGES = {1: "'zero2'", 2: "'zero2'", 3: "'fsdp'"}
_ZERO = {f"zero{dash}{stage}": meant for dash in ("", "-", "_") for stage, meant in _STAGES.items()}
_OTHER_NAMES = {"auto": "'auto'", "none": "None", "fsdp2": "'fsdp'", **_ZERO}


def recipe_named(name: str) -> Recipe:
    """Return the recipe of that name. Raises RecipeError if there is none."""
    if "+" in name:
        raise RecipeError(f"recipe {name!r} takes an axis for each of its names; give an axis one, such as {{'dp': 'fsdp'}}")
    if name not in _RECIPES:
        meant = {**{one: repr(one) for one in _RECIPES}, **_OTHER_NAMES}
        close = difflib.get_close_matches(name.lower(), meant, n=1)
        hint = f" Did you mean {meant[close[0]]}?" if close else ""
        known = f"recipes are {', '.join(_RECIPES)}, or two of them joined, such as 'fsdp+megatron'"
        raise RecipeError(f"unknown recipe {name!r}; {known}.{hint}")
    return _RECIPES[name]


def with_frees(recipe: Recipe, *, frees_gathered: bool) -> Recipe:
    """Return the recipe or twin with that `frees_gathered`, or `recipe` itself if there is none."""
    if recipe.frees_gathered == frees_gathered or not recipe.twin:
        return recipe
    return recipe_named(recipe.twin)
