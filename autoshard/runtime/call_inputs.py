"""Check a tensor argument of a call, and take this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import InputSpec, format_tensor
from autoshard.runtime.parameters import Place
from autoshard.runtime.placements import dtensor_placements
from passes.errors import InputError
from passes.ir.layout import Layout, local_part, local_shape
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class LocalInput:
    """A tensor argument as it was captured, and its layout."""

    spec: InputSpec
    layout: Layout

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return local_shape(self.layout, self.spec.shape, mesh)

    def check(self, tensor: torch.Tensor, place: Place) -> None:
        """Raise InputError for another shape, dtype or device than captured; does not communicate."""
        if isinstance(tensor, DTensor):
            wrong_shape = self._wrong_global_shape(tensor)
        else:
            wrong_shape = self._wrong_shape(tensor, place.mesh)
        problem = wrong_shape or self._dtype(tensor) or self._device(tensor, place) or self._gradient(tensor)
        if problem:
            raise InputError(f"input {self.spec.path!r} {problem}")

    def take(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """Return this rank's part of a checked argument, contiguous; a DTensor is redistributed to the plan's layout.
        """
        if not isinstance(tensor, DTensor):
            return tensor.contiguous()  # a capture does not depend on the strides of arguments
        placed = tensor.redistribute(place.device_mesh, dtensor_placements(self.layout, place.mesh))
        local: torch.Tensor = placed.to_local()
        return local.contiguous()

    def cut(self, whole: torch.Tensor, place: Place) -> torch.Tensor:
        """Return this rank's part of the argument's global value, on the mesh's device."""
        if tuple(whole.shape) != self.spec.shape:
            raise InputError(
                f"input {self.spec.path!r} is {format_tensor(whole.shape, whole.dtype)}, but the model was captured "
                f"with the global batch {format_tensor(self.spec.shape, self.spec.dtype)}; give batches of one shape"
            )
        return local_part(whole, self.layout, place.mesh, place.coordinate).to(place.device)

    def _wrong_global_shape(self, tensor: DTensor) -> str | None:
        if tuple(tensor.shape) == self.spec.shape:
            return None
        return (
            f"is a DTensor of global shape {list(tensor.shape)}, but the model was captured with "
            f"{list(self.spec.shape)}; give batches of one shape"
        )

    def _wrong_shape(self, tensor: torch.Tensor, mesh: Mesh) -> str | None:
        if tuple(tensor.shape) == self.local_shape(mesh):
            return None
        spec = self.spec
        advice = "give batches of one shape"
        if tuple(tensor.shape) == spec.shape:
            advice = "this is the whole batch: give this rank's part of it, which model.shard(...) takes"
        return (
            f"is {format_tensor(tensor.shape, tensor.dtype)}, but the model was captured with "
            f"{format_tensor(spec.shape, spec.dtype)}, of which {self.layout.format(mesh)} leaves this rank "
            f"{format_tensor(self.local_shape(mesh), spec.dtype)}; {advice}"
        )

    def _dtype(self, tensor: torch.Tensor) -> str | None:
        if tensor.dtype == self.spec.dtype:
            return None
        return (
            f"is {tensor.dtype}, but the model was captured with {self.spec.dtype}; convert it: .to({self.spec.dtype})"
        )

    def _device(self, tensor: torch.Tensor, place: Place) -> str | None:
        if tensor.device == place.device:
            return None
        return f"is on {tensor.device}, but the mesh is on {place.device}; move it: .to({str(place.device)!r})"

    def _gradient(self, tensor: torch.Tensor) -> str | None:
        if self.spec.requires_grad or not (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        return (
            "requires a gradient, but the model was captured with one that does not; detach it, or capture the model "
            "with an input that requires a gradient"
        )
