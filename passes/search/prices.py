"""Seconds of what a choice computes and of what a reshard moves, by the formulas that the simulator uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.cost.collective import collective_seconds, link_of
from passes.errors import CompilerError
from passes.ir.collective import COMMUNICATING, all_gather, all_reduce, reduce_scatter, take_part
from passes.ir.hardware import Hardware
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, local_shape
from passes.ir.mesh import Mesh
from passes.ir.steps import Kind, Step, plan_steps
from passes.search.problem import Floats, Move

Key = tuple[tuple[int, ...], int, Layout, Layout, int]


@dataclass(frozen=True)
class Prices:
    """Prices on one mesh of one hardware."""

    mesh: Mesh
    hardware: Hardware
    _moves: dict[Key, Move | None] = field(default_factory=dict)
    _planned: dict[tuple[Layout, Layout, tuple[int, ...]], tuple[Step, ...] | None] = field(default_factory=dict)
    _tables: dict[tuple[int, float, int, float, float], Floats] = field(default_factory=dict)
    _locals: dict[tuple[tuple[int, ...], Layout], tuple[int, ...]] = field(default_factory=dict)

    def local(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """Shape of one rank's part."""
        key = shape, layout
        if key not in self._locals:
            self._locals[key] = local_shape(layout, shape, self.mesh)
        return self._locals[key]

    def part(self, shape: tuple[int, ...], layout: Layout) -> float:
        """One rank's elements over all."""
        whole = math.prod(shape)
        return math.prod(self.local(shape, layout)) / whole if whole else 0.0

    def nbytes(self, shape: tuple[int, ...], itemsize: int, layout: Layout) -> float:
        """Bytes of one rank's part."""
        return float(math.prod(self.local(shape, layout)) * itemsize)

    def move(
        self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout, bucket: int = 0
    ) -> Move | None:
        """A reshard as `lower_reshards` emits it; None where there is no way.

        With `bucket` bytes, a smaller collective is part of one of that size, and so is its time.
        """
        key = shape, itemsize, source, target, bucket
        if key not in self._moves:
            self._moves[key] = self._move(*key)
        return self._moves[key]

    def _move(self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout, bucket: int) -> Move | None:
        if source == target:
            return Move()
        steps = self._steps(source, target, shape)
        if steps is None:
            return None
        seconds = {"inside": 0.0, "across": 0.0, "local": 0.0}
        before = source
        for step in steps:
            where, time = self._step(step, before, shape, itemsize, bucket)
            seconds[where] += time
            before = step.layout
        return Move(**seconds)

    def _steps(self, source: Layout, target: Layout, shape: tuple[int, ...]) -> tuple[Step, ...] | None:
        """As `plan_steps`; where one axis moves, and not from digit to digit, the one step that it takes."""
        moving = [a for a in range(self.mesh.ndim) if source.on(a) != target.on(a)]
        if len(moving) == 1:
            have, want = source.on(moving[0]), target.on(moving[0])
            kind = _DIRECT.get((type(have), type(want)))
            if kind is not None and not (kind is reduce_scatter and have != Partial("sum")):
                return (Step(kind, (moving[0],), target, 0),)
        key = source, target, shape
        if key not in self._planned:
            try:
                self._planned[key] = plan_steps(source, target, shape, self.mesh)
            except CompilerError:
                self._planned[key] = None
        return self._planned[key]

    def _step(
        self, step: Step, before: Layout, shape: tuple[int, ...], itemsize: int, bucket: int
    ) -> tuple[str, float]:
        sizes = [self.nbytes(shape, itemsize, layout) for layout in (before, step.layout)]
        if step.kind is take_part:
            return "local", 0.0  # a view
        if step.kind not in COMMUNICATING:
            return "local", 2 * sizes[1] / self.hardware.memory_bandwidth
        group = self.mesh.group_shape(tuple(self.mesh.names[axis] for axis in step.axes))
        nbytes = max(sizes)
        message = max(nbytes, bucket)
        seconds = collective_seconds(step.kind.__name__, message, group, self.hardware)
        return link_of(group), seconds * nbytes / message if message else 0.0

    def least(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        *,
        bucket: int,
        weights: Mapping[str, float],
    ) -> Floats:
        """At most the cost of each move, seconds on a link weighted by `weights`: that of its dearest axis, with all
        others as sharded as they get."""
        have, want = (np.array([_codes(layout) for layout in side]) for side in (sources, targets))
        ids: dict[Placement, int] = {}
        names = [
            np.array([[ids.setdefault(p, len(ids)) for p in layout.placements] for layout in side])
            for side in (sources, targets)
        ]
        moved = names[0][:, None, :] != names[1][None, :, :]
        kinds = np.where(moved, _KIND_OF[have[:, None, :], want[None, :, :]], -1)
        sharded = (have[:, None, :] == _SHARD) | (want[None, :, :] == _SHARD)
        found = np.zeros((len(sources), len(targets)))
        for axis in range(self.mesh.ndim):
            if self.mesh.sizes[axis] == 1:
                continue
            others = [other for other in range(self.mesh.ndim) if other != axis]
            zero = np.zeros(found.shape, dtype=np.int64)
            parts = sum(((sharded[:, :, o]).astype(np.int64) << o for o in others), zero)
            joins = sum(((kinds[:, :, o] == kinds[:, :, axis]).astype(np.int64) << o for o in others), zero)
            table = self._least_on(axis, float(math.prod(shape) * itemsize), bucket, weights["inside"], weights["across"])
            seconds = table[kinds[:, :, axis], parts, joins]
            found = np.maximum(found, np.where(kinds[:, :, axis] >= 0, seconds, 0.0))
        return found

    def direct(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> NDArray[np.bool_]:
        """Moves that take their parts of what is whole, or one step on one axis: for those `least` is the price."""
        have, want = (np.array([_codes(layout) for layout in side]) for side in (sources, targets))
        ids: dict[Placement, int] = {}
        names = [
            np.array([[ids.setdefault(p, len(ids)) for p in layout.placements] for layout in side])
            for side in (sources, targets)
        ]
        moved = names[0][:, None, :] != names[1][None, :, :]
        takes = (have[:, None, :] == _WHOLE) & (want[None, :, :] == _SHARD)
        steps = (have[:, None, :] != _WHOLE) & (want[None, :, :] != _TERM)
        steps &= (have[:, None, :] != _SHARD) | (want[None, :, :] != _SHARD)
        all_taken: NDArray[np.bool_] = (takes | ~moved).all(2)
        one_step: NDArray[np.bool_] = (moved.sum(2) == 1) & (steps | ~moved).all(2)
        return all_taken | one_step

    def _least_on(self, axis: int, nbytes: float, bucket: int, inside: float, across: float) -> Floats:
        """Weighted seconds by kind, by other axes that shard (bits), and by those that may move in the same step."""
        key = axis, nbytes, bucket, inside, across
        if key not in self._tables:
            size = 1 << self.mesh.ndim
            table = np.zeros((len(_KINDS), size, size))
            weights = {"inside": inside, "across": across}
            for kind, parts, joins in np.ndindex(*table.shape):
                if not (parts >> axis & 1 or joins >> axis & 1):
                    table[kind, parts, joins] = self._least_in(_KINDS[kind], axis, nbytes, bucket, parts, joins, weights)
            self._tables[key] = table
        return self._tables[key]

    def _least_in(
        self, kind: str, axis: int, nbytes: float, bucket: int, parts: int, joins: int, weights: Mapping[str, float]
    ) -> float:
        joins = 0 if kind == "all_to_all" else joins
        costs = []
        for group in range(joins + 1):
            if group & ~joins:
                continue
            axes = [a for a in range(self.mesh.ndim) if a == axis or group >> a & 1]
            ways = math.prod(n for a, n in enumerate(self.mesh.sizes) if parts >> a & 1 and a not in axes)
            costs += [self._weighted(one, axes, nbytes / ways, bucket, weights) for one in _ALSO.get(kind, (kind,))]
        return min(costs)

    def _weighted(self, kind: str, axes: Sequence[int], nbytes: float, bucket: int, weights: Mapping[str, float]) -> float:
        group = self.mesh.group_shape(tuple(self.mesh.names[a] for a in axes))
        nbytes /= math.prod(self.mesh.sizes[a] for a in axes) if kind == "all_to_all" else 1
        message = max(nbytes, bucket)
        seconds = collective_seconds(kind, message, group, self.hardware)
        return weights[link_of(group)] * seconds * nbytes / message if message else 0.0


_DIRECT: dict[tuple[type[Placement], type[Placement]], Kind] = {
    (Shard, Replicate): all_gather,
    (Partial, Shard): reduce_scatter,
    (Partial, Replicate): all_reduce,
    (Replicate, Shard): take_part,
}
_WHOLE, _SHARD, _TERM = range(3)
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_KIND_OF = np.array([[-1, -1, -1], [0, 3, 0], [2, 1, 2]])  # by code had and wanted; -1: nothing is sent
_ALSO = {"all_to_all": ("all_to_all", "all_gather")}  # where an exchange is no way, the digit is gathered


def _codes(layout: Layout) -> list[int]:
    kinds = {Shard: _SHARD, Partial: _TERM}
    return [kinds.get(type(placement), _WHOLE) for placement in layout.placements]
