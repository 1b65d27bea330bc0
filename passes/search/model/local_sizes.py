"""The sizes of one rank's part of a tensor, by its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from passes.ir.layout import Layout, local_shape
from passes.ir.mesh import Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LocalSizes:
    """Shapes, parts and bytes on one rank of a mesh, each shape computed once."""

    mesh: Mesh
    _shapes: dict[tuple[Shape, Layout], Shape] = field(default_factory=dict)

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
