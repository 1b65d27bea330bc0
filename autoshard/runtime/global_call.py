"""Turn a call with one rank's part of each input into the call with global inputs, and say how each is split."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import bind_call
from autoshard.config.constraints import placement_of
from autoshard.config.options import Placements
from passes.errors import CaptureError, InputError
from passes.ir.layout import Layout, R, Shard, is_even, next_digit, replicated
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Splits:
    """The split of inputs, to the extent known before the model is captured."""

    mesh: Mesh
    data_axes: tuple[int, ...]  # axes whose recipe splits the batch: dim 0
    inputs: Placements | None  # the user's constraints
    unknown_axes: tuple[str, ...] = ()  # axes that split inputs as only a plan says, while there is none
    is_planned: bool = True

    @property
    def is_constrained(self) -> bool:
        """Return whether the user's constraints decide, as long as there is no plan, how inputs are split."""
        return not self.is_planned and bool(self.inputs)

    def whole(self, path: str, tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
        """Return a meta tensor of global shape for `tensor`, one rank's part of the input `path`."""
        shape = self.whole_shape(path, tensor, batch)
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    def whole_shape(self, path: str, tensor: torch.Tensor, batch: int | None) -> tuple[int, ...]:
        """Return the global shape of `tensor`, one rank's part of the input `path` (a DTensor has it itself)."""
        shape = list(tensor.shape)
        if not isinstance(tensor, DTensor):
            for axis, shard in self._shards(path, tensor, batch):
                shape[shard.dim] *= self.mesh.sizes[axis]
        return tuple(shape)

    def layout(self, path: str, whole: torch.Tensor, batch: int | None) -> Layout:
        """Return the layout of the input `path` of this global shape: split where axes divide it, else whole.

        A batch that they do not divide together is whole on all of them: programs pad it.
        """
        layout, uneven = replicated(self.mesh), set[int]()
        for axis, shard in self._shards(path, whole, batch):
            digit = next_digit(layout, shard.dim, self.mesh, mirror=shard.mirror > 0) if shard.is_bare else shard
            split = layout.with_on(axis, digit)
            if is_even(split, whole.shape, self.mesh):
                layout = split
            else:
                uneven.add(shard.dim)
        for axis in layout.axes_on(0) if 0 in uneven and whole.shape[0] == batch else ():
            layout = layout.with_on(axis, R)
        return layout

    def _shards(self, path: str, tensor: torch.Tensor, batch: int | None) -> Iterator[tuple[int, Shard]]:
        """Yield the axes that split the input. `batch` is the size of dim 0 that marks a tensor as part of a batch."""
        for axis, name in enumerate(self.mesh.names):
            shard = self._shard(path, name, axis, tensor, batch)
            if shard is not None:
                yield axis, shard

    def _shard(self, path: str, name: str, axis: int, tensor: torch.Tensor, batch: int | None) -> Shard | None:
        for pattern, axes in (self.inputs or {}).items():
            if fnmatch.fnmatchcase(path, pattern) and name in axes:
                placement = placement_of(axes[name], "inputs", path, tensor.shape)
                return placement if isinstance(placement, Shard) else None
        if name in self.unknown_axes and tensor.dim():
            raise InputError(
                f"how axis {name!r} splits the input {path!r} is known once the model is captured: give one global batch to "
                f"autoshard(..., args=...) or kwargs=, or say it: Options(inputs={{{path!r}: {{{name!r}: 'S(1)'}}}})"
            )
        is_batch = tensor.dim() > 0 and tensor.shape[0] == batch
        return Shard(0) if axis in self.data_axes and is_batch else None


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
    tensors = tensors_of(call.leaves)
    batch = batch_of(tensors)
    return call.with_leaves({**call.leaves, **{p: splits.whole(p, t, batch) for p, t in tensors.items()}})


def tensors_of(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among the leaves of a call, by path."""
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def batch_of(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Return the batch size of a call: that of its first tensor with a dim."""
    return next((tensor.shape[0] for tensor in tensors.values() if tensor.dim() > 0), None)


def layouts_of_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], splits: Splits
) -> dict[str, Layout]:
    """Return the layout of every tensor of a call with global inputs, by path."""
    tensors = tensors_of(bind_call(inspect.signature(module.forward), args, dict(kwargs)).leaves)
    batch = batch_of(tensors)
    return {path: splits.layout(path, tensor, batch) for path, tensor in tensors.items()}
