"""Turn the gradients that each rank's loss gives to outputs into those of the loss of the global batch.

Where the batch is split, a loss outside of the model is of this rank's part, and the loss of the global batch is the mean over
ranks, or their sum (`Options(loss=...)`). The gradient of a part is scaled. That of an output that is whole on every rank, such
as the scale of logits, is the mean, or the sum, of what the ranks found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoshard.runtime.parameters import Place
from passes.ir.layout import Layout, R, Shard
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class OutputGradients:
    """The layouts of a program's outputs, and the mesh axes over which its caller has parts of inputs or outputs.

    With `sums`, the loss of the global batch is the sum over ranks, else the mean.
    """

    mesh: Mesh
    layouts: tuple[Layout, ...]
    axes: tuple[int, ...]
    sums: bool = False

    @staticmethod
    def of(mesh: Mesh, inputs: Sequence[Layout], outputs: Sequence[Layout], *, sums: bool) -> OutputGradients:
        """Return those of a program with inputs and outputs in these layouts."""
        parts = (*inputs, *outputs)
        axes = (axis for axis, size in enumerate(mesh.sizes) if size > 1 and any(one.on(axis) != R for one in parts))
        return OutputGradients(mesh, tuple(outputs), tuple(axes), sums)

    def scale(self, number: int) -> float:
        """Return the factor for the gradient of an output: one over the number of parts, or 1 if the losses are summed."""
        if self.sums:
            return 1.0
        pairs = zip(self.mesh.sizes, self.layouts[number].placements, strict=True)
        return 1.0 / math.prod(size for size, placement in pairs if isinstance(placement, Shard))

    def axes_to_join(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, tuple[int, ...]]:
        """Return the axes over which ranks may have found different gradients of a whole output, by its number.

        `gradients` are of the outputs that the loss uses. If these are numbers alone, they are losses of the global batch, the
        same on every rank. If none is a part, the losses are not summed either.
        """
        axes = [axis for axis in self.axes if self._differ(axis, gradients)]
        found = {number: tuple(axis for axis in axes if self.layouts[number].on(axis) == R) for number in gradients}
        return {number: over for number, over in found.items() if over}

    def join(self, gradient: torch.Tensor, axes: Sequence[int], place: Place) -> torch.Tensor:
        """Return the mean, or the sum, of a gradient over mesh axes. All ranks have to call this."""
        joined = gradient.detach().clone(memory_format=torch.contiguous_format)
        for axis in axes:
            dist.all_reduce(joined, group=place.device_mesh.get_group(axis))
            if not self.sums:
                joined /= self.mesh.sizes[axis]
        return joined

    def _differ(self, axis: int, gradients: Mapping[int, torch.Tensor]) -> bool:
        if any(self.layouts[number].on(axis) != R for number in gradients):
            return True
        return not self.sums and any(gradient.dim() > 0 for gradient in gradients.values())
