"""Expert plans, one record a file, which recognize structures in graphs and know no model by name.

    ddp zero2 fsdp hsdp   data parallelism
    context_parallel/     sequences of inputs are sharded; attention in one of three ways
    megatron/             tensor and sequence parallelism, found in the graph
    recipe                what a recipe is
    registry              recipes by name
"""

from __future__ import annotations

from passes.recipes.recipe import Decision, Decisions, Recipe, Site
from passes.recipes.registry import recipe_named, register_recipe, registered_recipes, with_frees

__all__ = [
    "Decision",
    "Decisions",
    "Recipe",
    "Site",
    "recipe_named",
    "register_recipe",
    "registered_recipes",
    "with_frees",
]
