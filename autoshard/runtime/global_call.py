"""Turn a call with one rank's part of each input into the call with global inputs."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import bind_call
from autoshard.config.constraints import placement_of
from autoshard.config.options import Placements
from passes.errors import CaptureError
from passes.ir.layout import Shard
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Splits:
    """The split of inputs, to the extent known before the model is captured."""

    mesh: Mesh
    data_axes: tuple[int, ...]  # axes whose recipe splits the batch: dim 0
    inputs: Placements | None  # the user's constraints

    def whole(self, path: str, tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
        """Return a meta tensor of global shape for `tensor`, one rank's part of the input `path`."""
        shape = list(tensor.shape)
        if not isinstance(tensor, DTensor):
            for axis, name in enumerate(self.mesh.names):
                dim = self._dim(path, name, axis, tensor, batch)
                if dim is not None:
                    shape[dim] *= self.mesh.sizes[axis]
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    def _dim(self, path: str, name: str, axis: int, tensor: torch.Tensor, batch: int | None) -> int | None:
        for pattern, axes in (self.inputs or {}).items():
            if fnmatch.fnmatchcase(path, pattern) and name in axes:
                placement = placement_of(axes[name], "inputs", path, tensor.shape)
                return placement.dim if isinstance(placement, Shard) else None
        is_batch = tensor.dim() > 0 and tensor.shape[0] == batch
        return 0 if axis in self.data_axes and is_batch else None


def global_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], splits: Splits
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with every tensor in its global shape, on meta.

    Raises CaptureError for arguments that `forward` does not take.
    """
    signature = inspect.signature(module.forward)
    try:
        call = bind_call(signature, args, dict(kwargs))
    except TypeError as error:
        raise CaptureError(f"{type(module).__name__}.forward{signature} cannot be called like this: {error}") from error
    tensors = {path: leaf for path, leaf in call.leaves.items() if isinstance(leaf, torch.Tensor)}
    first = next((t for t in tensors.values() if t.dim() > 0), None)
    batch = None if first is None else first.shape[0]
    return call.with_leaves({**call.leaves, **{p: splits.whole(p, t, batch) for p, t in tensors.items()}})
