"""Shard inside a group and replicate between groups: FSDP2 on a mesh of two dimensions."""

from __future__ import annotations

from passes.errors import RecipeError
from passes.ir.mesh import Mesh
from passes.recipes.ddp import DDP
from passes.recipes.fsdp import FSDP
from passes.recipes.recipe import Recipe


def replicate_then_shard(mesh: Mesh, axes: tuple[int, ...]) -> tuple[Recipe, ...]:
    """Replicate over the first of its axes and shard over the others."""
    if len(axes) == 1:
        raise RecipeError(
            f"recipe 'hsdp' is on axis {mesh.names[axes[0]]!r} only; it needs two: the first replicates "
            "parameters, the others shard them. Use a mesh such as 'replicate=2,shard=4', or 'fsdp'"
        )
    return (DDP, *[FSDP] * (len(axes) - 1))


HSDP = Recipe(
    "hsdp", "ddp over the first of its axes, fsdp over the others", carries_batch=True, spread=replicate_then_shard
)
