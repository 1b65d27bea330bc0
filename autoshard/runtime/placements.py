"""Convert layouts to DTensor placements and back, and one rank's part to a local tensor.

DTensor applies placements from left to right, each to the result of those before it. A digit of ours is relative to
the whole dim, so `outer` is divided by the digits outside of it that were already applied.

If the axis does not divide a dim, DTensor stores the part unpadded (as `torch.chunk` cuts it) and a graph pads it, so
that shapes are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Placement as DPlacement
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from passes._torch import Box, shard_of, strided_shard
from passes.errors import ConstraintError
from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_storable, local_shape, take_digit
from passes.ir.mesh import Mesh


def dtensor_placements(layout: Layout, mesh: Mesh) -> tuple[DPlacement, ...]:
    """Return `layout` as DTensor's placements, one per mesh axis. Inverse: `layout_of_placements`."""
    return tuple(_dtensor_placement(layout, axis, mesh) for axis in range(mesh.ndim))


def _dtensor_placement(layout: Layout, axis: int, mesh: Mesh) -> DPlacement:
    placement = layout.on(axis)
    if isinstance(placement, Shard):
        if placement.mirror:
            raise ConstraintError(f"{placement} on axis {mesh.names[axis]!r} is no placement of DTensor's: give a plain tensor")
        factor = placement.outer // _taken_before(layout, axis, placement, mesh)
        return DShard(placement.dim) if factor == 1 else strided_shard(placement.dim, factor)
    if isinstance(placement, Partial):
        return DPartial(placement.op)
    return DReplicate()


def _taken_before(layout: Layout, axis: int, placement: Shard, mesh: Mesh) -> int:
    """Return the number of ranks, on axes to the left, that outer digits of the same dim divide it among."""
    taken = 1
    for left in range(axis):
        other = layout.on(left)
        if isinstance(other, Shard) and other.dim == placement.dim and other.outer < placement.outer:
            taken *= mesh.sizes[left]
    return taken


def layout_of_placements(placements: Sequence[DPlacement], mesh: Mesh) -> Layout:
    """Return DTensor's placements as a layout. Raises ConstraintError for a placement that a layout cannot express."""
    layout = Layout((R,) * mesh.ndim)
    if len(placements) != mesh.ndim:
        raise ConstraintError(f"mesh {mesh} needs {mesh.ndim} placements, got {tuple(placements)}")
    for axis, placement in enumerate(placements):
        layout = layout.with_on(axis, _placement(placement, layout, axis, mesh))
    return layout


def _placement(placement: DPlacement, left: Layout, axis: int, mesh: Mesh) -> Placement:
    if isinstance(placement, DReplicate):
        return R
    if isinstance(placement, DPartial):
        return Partial(str(placement.reduce_op))
    shard = shard_of(placement)
    if shard is None:
        raise ConstraintError(f"placement {placement} is none of Replicate(), Shard(dim) and Partial()")
    dim, factor = shard
    # The factor counts blocks of what remains after the axes to the left: walk their digits, outermost first.
    outer, remaining = 1, factor
    for other in left.axes_on(dim):
        digit = left.on(other)
        assert isinstance(digit, Shard)
        gap = digit.outer // outer
        if remaining < gap:
            break
        if remaining % gap:
            raise ConstraintError(f"placement {placement} of axis {mesh.names[axis]!r} cuts through that of another")
        remaining //= gap
        outer = digit.outer * mesh.sizes[other]
    return Shard(dim, outer * remaining)


@dataclass(frozen=True)
class Storage:
    """One rank's storage of its part of a tensor of global `shape`."""

    layout: Layout
    shape: tuple[int, ...]
    mesh: Mesh
    coordinate: tuple[int, ...]

    def __post_init__(self) -> None:
        if not is_storable(self.layout, self.shape, self.mesh):
            raise ConstraintError(
                f"shape {list(self.shape)} cannot be stored as {self.layout.format(self.mesh)} on {self.mesh}: only "
                "the innermost axis of a dim may leave a remainder; choose other axes or another dim"
            )

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Return the shape of the part in a graph: equal on all ranks."""
        return local_shape(self.layout, self.shape, self.mesh)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the part as DTensor stores it."""
        return tuple(
            size if part is None else part.blocks * part.kept
            for size, part in zip(self.padded_shape, self._remainders(), strict=True)
        )

    @cached_property
    def is_even(self) -> bool:
        return all(part is None for part in self._remainders())

    def pad(self, local: torch.Tensor) -> torch.Tensor:
        """Return a stored part as a graph takes it, with zeros beyond the end of the dim."""
        for dim, part in enumerate(self._remainders()):
            if part is None or part.kept == part.length:
                continue
            split = _split(local, dim, (part.blocks, part.kept))
            missing = list(split.shape)
            missing[dim + 1] = part.length - part.kept
            local = torch.cat([split, split.new_zeros(missing)], dim + 1).flatten(dim, dim + 1)
        return local

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Remove the padding that `pad` added."""
        for dim, part in enumerate(self._remainders()):
            if part is None or part.kept == part.length:
                continue
            split = _split(padded, dim, (part.blocks, part.length))
            padded = split.narrow(dim + 1, 0, part.kept).flatten(dim, dim + 1)
        return padded.contiguous()

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a global tensor, without padding; a view if possible."""
        for dim in range(whole.dim()):
            for axis in reversed(self.layout.axes_on(dim)):
                placement = self.layout.on(axis)
                assert isinstance(placement, Shard)
                whole = _cut(whole, placement, self.mesh.sizes[axis], self.coordinate[axis])
        return whole

    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes of the global tensor that the stored part consists of."""
        boxes = [Box((), (), ())]
        for dim, size in enumerate(self.shape):
            runs = _runs(self._indices(dim, size))
            boxes = [
                Box((*box.offsets, start), (*box.sizes, length), (*box.local_offsets, at))
                for box in boxes
                for start, length, at in runs
            ]
        return tuple(boxes)

    def _indices(self, dim: int, size: int) -> torch.Tensor:
        """Return the global indices on `dim` that this rank stores, in order."""
        indices = torch.arange(size, device="cpu")
        for axis in reversed(self.layout.axes_on(dim)):
            placement = self.layout.on(axis)
            assert isinstance(placement, Shard)
            indices = _cut(indices, replace(placement, dim=0), self.mesh.sizes[axis], self.coordinate[axis])
        return indices

    def _remainders(self) -> tuple[Remainder | None, ...]:
        return tuple(self._remainder(dim, size) for dim, size in enumerate(self.shape))

    def _remainder(self, dim: int, size: int) -> Remainder | None:
        axes = self.layout.axes_on(dim)
        if not axes:
            return None
        placement = self.layout.on(axes[-1])
        assert isinstance(placement, Shard)
        ranks = self.mesh.sizes[axes[-1]]
        whole = size // placement.outer
        if whole % ranks == 0:
            return None
        length = -(-whole // ranks)
        kept = min(max(whole - self.coordinate[axes[-1]] * length, 0), length)
        blocks = placement.outer // math.prod(self.mesh.sizes[axis] for axis in axes[:-1])
        return Remainder(blocks, length, kept)


@dataclass(frozen=True)
class Remainder:
    """Uneven part of a dim: of each of `blocks` blocks of `length`, this rank has `kept` elements."""

    blocks: int
    length: int
    kept: int


def _split(tensor: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    return tensor.reshape([*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]])


def _cut(tensor: torch.Tensor, placement: Shard, size: int, coordinate: int) -> torch.Tensor:
    """Return the elements whose digit is `coordinate`, without padding; digits outside this one are still whole."""
    if placement.mirror:
        return take_digit(tensor, placement, size, coordinate)
    dim, outer = placement.dim, placement.outer
    length = tensor.shape[dim] // outer
    part = -(-length // size)
    start = min(coordinate * part, length)
    kept = min(part, length - start)
    if outer == 1:
        return tensor.narrow(dim, start, kept)
    return _split(tensor, dim, (outer, length)).narrow(dim + 1, start, kept).flatten(dim, dim + 1)


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the maximal runs of consecutive indices: (first index, length, position of the first)."""
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(indices)]
    return [(int(indices[start]), end - start, start) for start, end in zip(starts, ends, strict=True) if end > start]
