"""The sizes of one rank's part of a tensor, by its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from passes.ir.layout import Layout, Shard, local_shape
from passes.ir.mesh import Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LocalSizes:
    """Shapes, parts and bytes on one rank of a mesh, each shape computed once."""

    mesh: Mesh
    _shapes: dict[tuple[Shape, Layout], Shape] = field(default_factory=dict)
    _inner: dict[tuple[Shape, Layout, int], bool] = field(default_factory=dict)

    def local(self, shape: Shape, layout: Layout) -> Shape:
        """Return the shape of one rank's part."""
        key = shape, layout
        if key not in self._shapes:
            self._shapes[key] = local_shape(layout, shape, self.mesh)
        return self._shapes[key]

    def part(self, shape: Shape, layout: Layout) -> float:
        """Return one rank's elements over all."""
        whole = math.prod(shape)
        return math.prod(self.local(shape, layout)) / whole if whole else 0.0

    def nbytes(self, shape: Shape, itemsize: int, layout: Layout) -> float:
        """Return the bytes of one rank's part."""
        return float(math.prod(self.local(shape, layout)) * itemsize)

    def is_inner(self, shape: Shape, layout: Layout, axis: int) -> bool:
        """Return whether a rank's part lies between those of the others on an axis, not after or before all of them."""
        key = shape, layout, axis
        if key not in self._inner:
            self._inner[key] = self._is_inner(*key)
        return self._inner[key]

    def _is_inner(self, shape: Shape, layout: Layout, axis: int) -> bool:
        one, sizes = layout.placements[axis], self.mesh.sizes
        if not isinstance(one, Shard):
            return False
        axes = layout.axes_on(one.dim)
        outside = math.prod(sizes[other] for other in axes[: axes.index(axis)])
        return math.prod(self.local(shape, layout)[: one.dim]) > 1 or one.outer > outside
