"""Seconds of what a choice computes and of what a reshard moves, by the formulas that the simulator uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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
    _tables: dict[tuple[int, float, int], Floats] = field(default_factory=dict)
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
        sharded = (have[:, None, :] == _SHARD) | (want[None, :, :] == _SHARD)
        bits = sum(sharded[:, :, axis].astype(np.int64) << axis for axis in range(self.mesh.ndim))
        nbytes = float(math.prod(shape) * itemsize)
        found = np.zeros((len(sources), len(targets)))
        for axis in range(self.mesh.ndim):
            if self.mesh.sizes[axis] == 1:
                continue
            table = self._least_on(axis, nbytes, bucket) * weights[self._link(axis)]
            seconds = table[have[:, None, axis], want[None, :, axis], bits & ~(1 << axis)]
            moved = names[0][:, None, axis] != names[1][None, :, axis]
            found = np.maximum(found, np.where(moved, seconds, 0.0))
        return found

    def _link(self, axis: int) -> str:
        return link_of(self.mesh.group_shape((self.mesh.names[axis],)))

    def _least_on(self, axis: int, nbytes: float, bucket: int) -> Floats:
        """Seconds by kind of placement had and wanted, and by which other axes shard (bits)."""
        key = axis, nbytes, bucket
        if key in self._tables:
            return self._tables[key]
        ndim = self.mesh.ndim
        table = np.zeros((3, 3, 1 << ndim))
        group = self.mesh.group_shape((self.mesh.names[axis],))
        for (have, want), kind in _KINDS.items():
            for bits in range(1 << ndim):
                ways = math.prod(size for other, size in enumerate(self.mesh.sizes) if bits >> other & 1)
                size = nbytes / ways / (self.mesh.sizes[axis] if kind == "all_to_all" else 1)
                message = max(size, bucket)
                seconds = collective_seconds(kind, message, group, self.hardware)
                if kind == "all_to_all":  # where that is no way, the digit is gathered
                    seconds = min(seconds, collective_seconds("all_gather", message, group, self.hardware))
                table[have, want, bits] = seconds * size / message if message else 0.0
        self._tables[key] = table
        return table


_DIRECT: dict[tuple[type[Placement], type[Placement]], Kind] = {
    (Shard, Replicate): all_gather,
    (Partial, Shard): reduce_scatter,
    (Partial, Replicate): all_reduce,
    (Replicate, Shard): take_part,
}
_WHOLE, _SHARD, _TERM = range(3)
_KINDS = {
    (_SHARD, _WHOLE): "all_gather",
    (_SHARD, _TERM): "all_gather",
    (_TERM, _SHARD): "reduce_scatter",
    (_TERM, _WHOLE): "all_reduce",
    (_TERM, _TERM): "all_reduce",
    (_SHARD, _SHARD): "all_to_all",
}


def _codes(layout: Layout) -> list[int]:
    kinds = {Shard: _SHARD, Partial: _TERM}
    return [kinds.get(type(placement), _WHOLE) for placement in layout.placements]
