"""Cut a global batch to this rank's part, as calls take it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import format_tensor
from autoshard.runtime.calls.programs import RuntimeState, bound_call
from autoshard.runtime.calls.whole_batches import remember, whole_shape
from autoshard.runtime.global_call import Splits, batch_of, tensors_of
from autoshard.runtime.parameters import Place
from autoshard.runtime.whole_tensor import WholeTensor, replicated_tensor
from passes._torch import flatten_pytree, map_pytree
from passes.errors import InputError
from passes.ir.layout import Layout, R, Shard, local_part


def parts_of(
    state: RuntimeState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call on a global batch with every tensor cut to this rank's part.

    A tensor whose global shape could not be told from its part, since axes do not divide it or since it is whole and as
    long as a part of the batch, comes back as a DTensor. Before there is a plan, the axes of data-parallel recipes split
    the batch. Raises InputError for arguments that `forward` does not take, and for a recipe that splits inputs as only a
    plan says, and for a part that was cut before, as parts of it would be another batch.

    Tensors beyond the arguments of `forward`, such as labels for a loss outside of the model, are cut like its first input: those
    that follow the others by position, and those that have a name that it does not take. Where that input is whole, they are
    tensors that are used like any other, as the outputs are.
    """
    advice = (
        "; model.shard takes the arguments that the model takes: model.shard(tokens, labels), model.shard(**batch). Tensors for "
        "a loss outside of the model go after all of these, or have a name that the model does not take: "
        "x, labels = model.shard(x, labels), parts = model.shard(**batch, target=labels)"
    )
    signature = state.states.signature
    (args, others), (taken, others_named) = _apart(signature, args), _apart_by_name(signature, kwargs)
    call = bound_call(state, args, taken, advice)
    tensors, splits = {path: _unmarked(one) for path, one in tensors_of(call.leaves).items()}, state.planner.splits()
    parts = _parts(tensors, splits, state.place)
    positional, named = call.as_written(call.leaves | parts, args, taken)
    first = next((path for path, tensor in tensors.items() if tensor.dim() > 0), None)
    if (others or others_named) and first is not None:
        layout = splits.layout(first, tensors[first], batch_of(tensors))
        cut = partial(_like_first, first=tensors[first], part=parts[first], layout=layout, place=state.place)
        others, others_named = map_pytree(cut, (others, others_named))
    named |= others_named
    return (*positional, *others), {name: named[name] for name in kwargs}  # in the order in which they were given


def _apart(signature: inspect.Signature, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the positional arguments that a function takes, and those beyond them if each of these has a tensor."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    taken = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    others = args[taken:]
    if inspect.Parameter.VAR_POSITIONAL in kinds or not all(map(_has_tensor, others)):
        return args, ()
    return args[:taken], others


def _apart_by_name(signature: inspect.Signature, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the named arguments that a function takes, and those with other names if each of these has a tensor."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    others = {name: value for name, value in kwargs.items() if name not in kinds}
    if inspect.Parameter.VAR_KEYWORD in kinds.values() or not all(map(_has_tensor, others.values())):
        return kwargs, {}
    return {name: value for name, value in kwargs.items() if name not in others}, others


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for _, leaf in flatten_pytree(value)[0])


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if isinstance(tensor, WholeTensor) else tensor


def _like_first(value: Any, first: torch.Tensor, part: torch.Tensor, layout: Layout, place: Place) -> Any:
    """Cut a tensor that is no argument of the model as the model's first input is cut, on the leading dims that are as long."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    lengths = zip(value.shape, first.shape, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], lengths))
    if alike and isinstance(part, DTensor):
        if layout.is_replicated:
            return WholeTensor.of(_unmarked(value).to(place.device))
        return replicated_tensor(_unmarked(value), place)  # outputs may be parts along another dim, which it must not join
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard) and placement.dim >= alike:
            layout = layout.with_on(axis, R)
    return _cut("a tensor beyond the model's arguments", _unmarked(value), layout, place)


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
    return _cut(f"input {path!r}", tensor, splits.layout(path, tensor, batch), place)


def _cut(name: str, tensor: torch.Tensor, layout: Layout, place: Place) -> torch.Tensor:
    part = local_part(tensor, layout, place.mesh, place.coordinate)
    if part.is_meta and place.device.type != "meta":
        raise InputError(f"{name} is on meta, where tensors have no values; give model.shard one on {place.device.type}")
    part = part.to(place.device)
    if part.shape != tensor.shape:
        if (whole := whole_shape(tensor)) is not None:
            raise InputError(
                f"{name} is {format_tensor(tensor.shape, tensor.dtype)}, this rank's part of "
                f"{format_tensor(whole, tensor.dtype)}, which model.shard(...) returned before; use it as it is, or "
                "give model.shard the whole batch"
            )
        remember(part, tensor)
    return part
