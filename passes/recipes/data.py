"""Where data-parallel axes store parameters and split the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.ir.layout import Layout, Placement, Shard, is_even, is_storable
from passes.ir.mesh import Mesh

DATA_RECIPES = ("ddp", "zero2", "fsdp")
SHARDED_RECIPES = ("zero2", "fsdp")  # parameters, gradients and optimizer state are stored sharded


def next_digit(layout: Layout, dim: int, mesh: Mesh) -> Shard:
    """The digit of `dim` inside those that axes already use."""
    outer = math.prod(mesh.sizes[axis] for axis in layout.axes_on(dim))
    for axis in layout.axes_on(dim):
        placement = layout.on(axis)
        assert isinstance(placement, Shard)
        outer = max(outer, placement.outer * mesh.sizes[axis])
    return Shard(dim, outer)


def stored_on(layout: Layout, axis: int, shape: Sequence[int], mesh: Mesh) -> Placement | None:
    """Where `axis` stores its part of a parameter: the first dim that divides, else dim 0, padded.

    None where no dim can be split (a scalar, or digits that other axes already pad).
    """
    tries = [layout.with_on(axis, next_digit(layout, dim, mesh)) for dim in range(len(shape))]
    even = [t for t in tries if is_even(t, shape, mesh)]
    padded = [t for t in tries if is_storable(t, shape, mesh)]
    found = (*even, *padded)
    return found[0].on(axis) if found else None
