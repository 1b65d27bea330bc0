"""Find the cheapest sequence of collectives and local steps from one layout to another.

The pass that lowers reshards and the search that prices them share it, so that prices match the emitted steps.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from passes.errors import CompilerError
from passes.ir.collectives import KINDS, Kind, kind_between
from passes.ir.layout import Layout, Partial, Placement, R, is_storable, local_shape
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Step:
    """One collective or local step, the axes that it moves, and the layout that it gives."""

    kind: Kind
    axes: tuple[int, ...]
    layout: Layout
    received: int  # elements that each rank receives


def plan_steps(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    """Return the cheapest steps from `source` to `target` for a tensor of global `shape`.

    Cheapest: fewest elements received per rank, then fewest collectives, then first found (Dijkstra). Steps exist
    between any two layouts that `is_storable` allows: reduce what is partial, gather all axes, take parts and terms.
    Raises CompilerError for other layouts.
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
            sends = int(step.kind.communicates)
            entry = (received + step.received, collectives + sends, pushed, step.layout, (*steps, step))
            heapq.heappush(frontier, entry)
    raise AssertionError(f"no way from {source.format(mesh)} to {target.format(mesh)} for a tensor of shape {shape}")


@lru_cache(maxsize=1 << 16)
def _next_steps(layout: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    found: list[Step] = []
    moves: dict[str, list[tuple[int, Placement]]] = {}
    for axis in range(mesh.ndim):
        for to in dict.fromkeys((target.on(axis), R)):
            kind = kind_between(layout.on(axis), to)
            if kind is not None:
                moves.setdefault(kind.name, []).append((axis, to))
    for name, single in moves.items():
        for count in (1,) if KINDS[name].takes_one_axis else range(1, len(single) + 1):
            for group in combinations(single, count):
                step = _step(name, group, layout, shape, mesh)
                if step is not None:
                    found.append(step)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _step(
    name: str, group: tuple[tuple[int, Placement], ...], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> Step | None:
    kind, axes = KINDS[name], tuple(axis for axis, _ in group)
    reductions = {layout.on(axis) for axis in axes if isinstance(layout.on(axis), Partial)}
    if len(set(axes)) < len(axes) or len(reductions) > 1:
        return None
    after = layout
    for axis, placement in group:
        after = after.with_on(axis, placement)
    if not is_storable(after, shape, mesh) or not kind.fits(layout, after, axes[0], shape, mesh):
        return None
    ranks = math.prod(mesh.sizes[axis] for axis in axes)
    held, given = (math.prod(local_shape(at, shape, mesh)) for at in (layout, after))
    return Step(kind, axes, after, 0 if kind.pieces is None else kind.pieces(held, given, ranks))
