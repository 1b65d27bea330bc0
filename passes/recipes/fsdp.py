"""Shard parameters and gather them for each use: FSDP2's default, ZeRO stage 3 (Rajbhandari et al. 2020)."""

from __future__ import annotations

from passes.recipes.recipe import Recipe
from passes.recipes.storage import first_dim_that_divides

FSDP = Recipe(
    "fsdp",
    "the batch is split, parameters are stored sharded and gathered in the forward and again in the backward",
    carries_batch=True,
    store=first_dim_that_divides,
    frees_gathered=True,
    twin="zero2",
)
