"""Reduce DTensors that leave a rank without elements, of which a maximum or an infinite norm of that rank's part is an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from passes._torch.dtensor import shard_of
from passes._torch.patches import once
from passes._torch.pytree import map_pytree

aten = torch.ops.aten
_Handler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]

_EXTREMA = (
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.argmin.default,
    aten._foreach_max.default,
)
_NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten._foreach_norm.Scalar)


def reduce_empty_parts() -> None:
    """Let `max()`, `amax()`, `argmax()` and norms of a DTensor be one device's where a rank has no elements of it.

    torch reduces each rank's part first. Of a parameter of one number, all ranks but the first have none, and fail, while the
    first waits for them.
    """
    once("DTensor's reductions", _gather_first)


def _gather_first() -> None:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for op in (*_EXTREMA, *_NORMS):
        handlers[op] = partial(_reduced, handlers.get(op, as_usual))


def _reduced(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return usual(op, map_pytree(_with_elements, args) if _needs_elements(op, args) else args, kwargs)


def as_usual(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Dispatch an op that has no handler."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, dict(kwargs))
    dispatcher.sharding_propagator.propagate(info)
    assert info.output_sharding is not None
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(local, info.output_sharding.output_spec)


def _needs_elements(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a result of no elements is not defined: sums of none are 0, but there is no least or largest of none."""
    order = args[1] if len(args) > 1 else 2
    return op in _EXTREMA or (isinstance(order, (int, float)) and (order < 0 or math.isinf(order)))


def _with_elements(given: Any) -> Any:
    if not isinstance(given, DTensor) or not _leaves_out_a_rank(given):
        return given
    return given.redistribute(placements=[Replicate()] * given.device_mesh.ndim)


def _leaves_out_a_rank(tensor: DTensor) -> bool:
    """Return whether the last of the ranks that shard a dim has nothing of it."""
    axes: dict[int, list[int]] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if (shard := shard_of(placement)) is not None:
            axes.setdefault(shard[0] % tensor.ndim, []).append(size)
    return any(min(_last(tensor.shape[dim], sizes), _last(tensor.shape[dim], sizes[::-1])) == 0 for dim, sizes in axes.items())


def _last(length: int, sizes: list[int]) -> int:
    """Return how much of a dim the last rank has, if axes of these sizes shard it one after another."""
    for size in sizes:
        length = max(0, length - (size - 1) * math.ceil(length / size))
    return length
