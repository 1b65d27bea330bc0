"""Cut a global batch to this rank's part, as calls take it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime.calls.programs import RuntimeState, bound_call
from autoshard.runtime.global_call import Splits, batch_of, tensors_of
from autoshard.runtime.parameters import Place, distributed_tensor
from passes.ir.layout import local_part, replicated


def parts_of(
    state: RuntimeState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call on a global batch with every tensor cut to this rank's part.

    A tensor that is split in another way than callers split it, since axes do not divide it, comes back as a DTensor:
    its global shape could not be told from its part. Raises InputError for arguments that `forward` does not take.
    """
    call = bound_call(state, args, kwargs)
    tensors = tensors_of(call.leaves)
    batch, splits = batch_of(tensors), state.planner.splits()
    parts = {path: _part(path, tensor, batch, splits, state.place) for path, tensor in tensors.items()}
    return call.as_written(call.leaves | parts, args, kwargs)


def _part(path: str, tensor: torch.Tensor, batch: int | None, splits: Splits, place: Place) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    if not splits.divide(path, tensor, batch):
        storage = place.storage(replicated(place.mesh), tuple(tensor.shape))
        return distributed_tensor(tensor.to(place.device).contiguous(), storage, place)
    return local_part(tensor, splits.layout(path, tensor, batch), place.mesh, place.coordinate).to(place.device)
