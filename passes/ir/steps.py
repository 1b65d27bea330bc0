"""The cheapest way from one layout to another, as collectives and local steps.

Shared by the pass that lowers reshards and by the search, which prices them: what is priced is what is emitted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

import torch

from passes.errors import CompilerError
from passes.ir.collective import all_gather, all_reduce, all_to_all, reduce_scatter, take_part, take_term
from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_even, is_storable, local_shape
from passes.ir.mesh import Mesh

Kind = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One collective or local step, the axes that it moves, and the layout that it gives."""

    kind: Kind
    axes: tuple[int, ...]
    layout: Layout
    received: int  # elements that each rank receives


def plan_steps(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target` for a tensor of global `shape`.

    Cheapest: fewest elements received per rank, then fewest collectives, then first found (Dijkstra). There is a way
    between any two layouts that `is_storable` allows: reduce what is partial, gather all axes, take parts and terms.
    Raises CompilerError for a layout that it does not allow.
    """
    for layout in (source, target):
        if not is_storable(layout, shape, mesh):
            raise CompilerError(f"{layout.format(mesh)} does not split a tensor of shape {shape}")
    frontier: list[tuple[int, int, int, Layout, tuple[Step, ...]]] = [(0, 0, 0, source, ())]
    done: set[Layout] = set()
    pushed = 0
    while frontier:
        received, collectives, _, layout, steps = heapq.heappop(frontier)
        if layout == target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in _next_steps(layout, target, shape, mesh):
            pushed += 1
            sends = int(step.kind not in (take_part, take_term))
            entry = (received + step.received, collectives + sends, pushed, step.layout, (*steps, step))
            heapq.heappush(frontier, entry)
    raise AssertionError(f"no way from {source.format(mesh)} to {target.format(mesh)} for a tensor of shape {shape}")


@lru_cache(maxsize=1 << 16)
def _next_steps(layout: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    found: list[Step] = []
    moves: dict[Kind, list[tuple[int, Placement]]] = {}
    for axis in range(mesh.ndim):
        for to in dict.fromkeys((target.on(axis), R)):
            kind = _kind(layout.on(axis), to)
            if kind is not None:
                moves.setdefault(kind, []).append((axis, to))
    for kind, single in moves.items():
        sizes = (1,) if kind is all_to_all else range(1, len(single) + 1)
        for count in sizes:
            for group in combinations(single, count):
                step = _step(kind, group, layout, shape, mesh)
                if step is not None:
                    found.append(step)
    return tuple(found)


def _kind(have: Placement, to: Placement) -> Kind | None:
    if have == to:
        return None
    match have, to:
        case Shard(), Shard():
            return all_to_all
        case Shard(), _:
            return all_gather if to == R else None
        case Partial(), Shard():
            return reduce_scatter if have.op == "sum" else None
        case Partial(), _:
            return all_reduce if to == R else None
        case _, Shard():
            return take_part
        case _, Partial():
            return take_term
    return None


@lru_cache(maxsize=1 << 16)
def _step(
    kind: Kind, group: tuple[tuple[int, Placement], ...], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> Step | None:
    axes = tuple(axis for axis, _ in group)
    if len(set(axes)) < len(axes) or (kind is all_reduce and len({layout.on(axis) for axis in axes}) > 1):
        return None
    after = layout
    for axis, placement in group:
        after = after.with_on(axis, placement)
    if not is_storable(after, shape, mesh):
        return None
    if kind is all_to_all and not _is_exchange(layout, after, axes[0], shape, mesh):
        return None
    ranks = math.prod(mesh.sizes[axis] for axis in axes)
    before, behind = (math.prod(local_shape(at, shape, mesh)) for at in (layout, after))
    received = {
        all_gather: (ranks - 1) * before,
        reduce_scatter: (ranks - 1) * behind,
        all_reduce: 2 * (ranks - 1) * -(-before // ranks),
        all_to_all: (ranks - 1) * -(-before // ranks),
    }
    return Step(kind, axes, after, received.get(kind, 0))


def _is_exchange(layout: Layout, after: Layout, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the axis's old and new digit lie side by side, so that one can be sent for the other."""
    return is_even(Layout((*layout.placements, after.on(axis))), shape, _twice(mesh, axis))


@cache
def _twice(mesh: Mesh, axis: int) -> Mesh:
    """`mesh` with an axis as large as `axis` besides."""
    return Mesh((*mesh.names, f"{mesh.names[axis]}_new"), (*mesh.sizes, mesh.sizes[axis]))
