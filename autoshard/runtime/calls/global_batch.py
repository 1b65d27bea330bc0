"""Cut a global batch to this rank's part, as calls take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autoshard.capture.signature import format_tensor
from autoshard.runtime.calls.programs import RuntimeState, bound_call
from autoshard.runtime.global_call import Splits, batch_of, tensors_of
from autoshard.runtime.parameters import Place
from autoshard.runtime.whole_tensor import WholeTensor, replicated_tensor
from passes.errors import InputError
from passes.ir.layout import local_part

_PARTS = WeakIdKeyDictionary()  # this rank's part of a tensor -> the shape of the whole


def parts_of(
    state: RuntimeState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call on a global batch with every tensor cut to this rank's part.

    A tensor whose global shape could not be told from its part, since axes do not divide it or since it is whole and as
    long as a part of the batch, comes back as a DTensor. Before there is a plan, the axes of data-parallel recipes split
    the batch. Raises InputError for arguments that `forward` does not take, and for a recipe that splits inputs as only a
    plan says, and for a part that was cut before, as parts of it would be another batch.
    """
    advice = "; model.shard takes the arguments that the model takes: model.shard(tokens, labels), model.shard(**batch)"
    call = bound_call(state, args, kwargs, advice)
    given = tensors_of(call.leaves)
    tensors = {path: one.plain() if isinstance(one, WholeTensor) else one for path, one in given.items()}
    parts = _parts(tensors, state.planner.splits(), state.place)
    return call.as_written(call.leaves | parts, args, kwargs)


def _parts(tensors: Mapping[str, torch.Tensor], splits: Splits, place: Place) -> dict[str, torch.Tensor]:
    batch = batch_of(tensors)
    parts = {path: _part(path, tensor, batch, splits, place) for path, tensor in tensors.items()}
    while unclear := [path for path in parts if not _is_clear(path, parts, tensors[path], splits)]:
        parts |= {path: replicated_tensor(tensors[path], place) for path in unclear}
    return parts


def _is_clear(path: str, parts: Mapping[str, torch.Tensor], tensor: torch.Tensor, splits: Splits) -> bool:
    """Return whether a call with `parts` is taken for one with `tensor`, as it is given here."""
    return splits.whole_shape(path, parts[path], batch_of(parts)) == tuple(tensor.shape)


def _part(path: str, tensor: torch.Tensor, batch: int | None, splits: Splits, place: Place) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    part = local_part(tensor, splits.layout(path, tensor, batch), place.mesh, place.coordinate).to(place.device)
    if part.shape != tensor.shape:
        if tensor in _PARTS:
            raise InputError(
                f"input {path!r} is {format_tensor(tensor.shape, tensor.dtype)}, this rank's part of "
                f"{format_tensor(_PARTS[tensor], tensor.dtype)}, which model.shard(...) returned before; give it to the model as "
                "it is, or give model.shard the whole batch"
            )
        _PARTS[part] = tuple(tensor.shape)
    return part
