"""Check a tensor argument of a call, and take this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from autoshard.capture.signature import InputSpec, format_tensor
from autoshard.runtime.parameters import Place
from autoshard.runtime.placements import dtensor_placements
from passes.errors import InputError
from passes.ir.layout import Layout, Shard, local_shape
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class LocalInput:
    """A tensor argument as it was captured, and its layout."""

    spec: InputSpec
    layout: Layout

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return local_shape(self.layout, self.spec.shape, mesh)

    def check(self, tensor: torch.Tensor, place: Place) -> None:
        """Raise InputError for a part of another shape, or on another device; does not communicate."""
        if tensor.device != place.device:
            raise InputError(
                f"input {self.spec.path!r} is on {tensor.device}, but the mesh is on {place.device}; move it: "
                f".to({str(place.device)!r})"
            )
        if tensor.layout is not torch.strided:
            raise InputError(f"input {self.spec.path!r} is {tensor.layout}, but a program takes dense tensors; give .to_dense()")
        if not isinstance(tensor, DTensor) and tuple(tensor.shape) != self.local_shape(place.mesh):
            spec = self.spec
            raise InputError(
                f"input {spec.path!r} is {format_tensor(tensor.shape, tensor.dtype)}, but of "
                f"{format_tensor(spec.shape, spec.dtype)}, {self.layout.format(place.mesh)} leaves this rank "
                f"{format_tensor(self.local_shape(place.mesh), spec.dtype)}; give what model.shard(...) returns"
            )

    def take(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """Return this rank's part of a checked argument, contiguous; a DTensor is redistributed to the plan's layout.
        """
        if not isinstance(tensor, DTensor):
            return tensor.contiguous()  # a capture does not depend on the strides of arguments
        if any(isinstance(placement, Shard) and placement.mirror for placement in self.layout.placements):
            return self._taken_from_whole(tensor, place).contiguous()
        placed = tensor.redistribute(place.device_mesh, dtensor_placements(self.layout, place.mesh))
        local: torch.Tensor = placed.to_local()
        return local.contiguous()

    def _taken_from_whole(self, tensor: DTensor, place: Place) -> torch.Tensor:
        """Return this rank's part of a DTensor, through the whole: DTensor has no mirrored placements."""
        whole = tensor.redistribute(place.device_mesh, [Replicate()] * place.mesh.ndim)
        terms = [Partial() if isinstance(placement, Shard) else Replicate() for placement in self.layout.placements]
        local: torch.Tensor = whole.to_local(grad_placements=terms)
        return place.storage(self.layout, tuple(tensor.shape)).part_of(local)
