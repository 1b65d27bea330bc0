"""Storage of parameters in parts, one per rank of an axis, and their gathering for use."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from passes.ir.graph import add_reshard, set_recompute
from passes.ir.layout import Layout, Placement, is_even, is_storable, next_digit
from passes.ir.mesh import Mesh


def first_dim_that_divides(layout: Layout, axis: int, shape: Sequence[int], mesh: Mesh) -> Placement | None:
    """Return the shard of the first dim that `axis` divides, else of dim 0, padded.

    None if no dim can be split (a scalar, or digits that other axes already pad).
    """
    tries = [layout.with_on(axis, next_digit(layout, dim, mesh)) for dim in range(len(shape))]
    even = [t for t in tries if is_even(t, shape, mesh)]
    padded = [t for t in tries if is_storable(t, shape, mesh)]
    found = (*even, *padded)
    return found[0].on(axis) if found else None


def reshard_for_use(value: Node, users: Sequence[Node], note: str, *, again: bool) -> Node:
    """Let `users` take `value` through one reshard, and return it; the caller sets its layout or pins, and its origin.

    With `again`, the reshard is repeated in the backward, instead of keeping its result.
    """
    new = add_reshard(value, note)
    set_recompute(new, again)
    for user in users:
        user.replace_input_with(value, new)
    return new
