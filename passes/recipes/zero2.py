"""Shard parameters between steps and keep them gathered through a step.

ZeRO stage 2 of Rajbhandari et al. 2020 (gradients and optimizer state are sharded, parameters are whole during a step);
FSDP2's `reshard_after_forward=False`.
"""

from __future__ import annotations

from passes.recipes.recipe import Recipe
from passes.recipes.storage import first_dim_that_divides

ZERO2 = Recipe(
    "zero2",
    "as fsdp, but parameters are gathered once and kept until the backward has used them",
    carries_batch=True,
    store=first_dim_that_divides,
    twin="fsdp",
)
