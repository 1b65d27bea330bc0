"""Change and read DTensors that are pending, as sums of ranks' parts or their maxima, as one device does.

torch does some things to each part that are not the same done to the sum: it fills it, takes its bits for another number, or
compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._ops import _math_ops, _pointwise_ops
from torch.distributed.tensor._ops._math_ops import _NormPartial

from passes._torch.dtensor import local_of_dtensor, shard_of
from passes._torch.dtensor_hooks.empty_parts import as_usual
from passes._torch.pytree import map_pytree

aten = torch.ops.aten
_Handler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]

_TRUTHS = aten.any.default, aten.any.dim, aten.any.dims
_NORMS = aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar
_FILLED = {"sum": 0, "product": 1, "avg": None, "max": None, "min": None}  # other ranks' parts, None: as the first one's


def reduce_pending_parts() -> None:
    """Install handlers that reduce pending parts, in front of the handlers that ops have already."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for op in _TRUTHS:
        handlers[op] = partial(_true_on_any, handlers.get(op, as_usual))
    for op in _NORMS:
        handlers[op] = partial(_of_magnitudes, handlers.get(op, as_usual))
    handlers[aten.view.dtype] = _seen_as
    _reduce_all_dims()
    _fill_as_placed()
    for op in (aten.threshold.default, aten.threshold_.default):  # which torch applies to maxima, though it may turn their order
        _pointwise_ops._register_single_dim_pointwise(op)


def reduced(tensor: DTensor) -> DTensor:
    """Return a tensor whose parts that are pending are one."""
    if not is_pending(tensor):
        return tensor
    return tensor.redistribute(placements=[Replicate() if one.is_partial() else one for one in tensor.placements])


def is_pending(tensor: Any) -> bool:
    """Return whether it is a DTensor that ranks' parts still have to be reduced to."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def _true_on_any(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Reduce truth values, which torch leaves as a sum: cast to a number, or multiplied, they would count ranks."""
    if len(args) > 1 and args[1] == []:  # all other ops reduce all dims then
        return args[0] != 0
    return reduced(usual(op, args, kwargs))


def _of_magnitudes(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Reduce maxima before their magnitudes, whose order is another."""
    return usual(op, map_pytree(lambda one: reduced(one) if is_pending(one) else one, args), kwargs)


def _seen_as(op: Any, args: tuple[DTensor, torch.dtype], kwargs: Mapping[str, Any]) -> Any:
    """Show the bits of a whole number, and count the numbers of a whole last dim where their size is another."""
    tensor = reduced(args[0])
    last = tensor.ndim - 1
    cut = [shard is not None and shard[0] % max(tensor.ndim, 1) == last for shard in map(shard_of, tensor.placements)]
    if args[1].itemsize != tensor.dtype.itemsize and any(cut):
        placements = [Replicate() if is_cut else one for is_cut, one in zip(cut, tensor.placements, strict=True)]
        tensor = tensor.redistribute(placements=placements)
    return as_usual(op, (tensor, *args[1:]), kwargs)


def fill_pending(tensor: DTensor, value: Any) -> DTensor:
    """Fill parts so that they reduce to a value, which stays true of what shares their memory."""
    for placement, index in zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True):
        if not isinstance(placement, Partial):
            continue
        is_norm, kind = isinstance(placement, _NormPartial), placement.reduce_op
        if not (is_norm or type(placement) is Partial) or kind not in _FILLED or (is_norm and value < 0):
            raise RuntimeError(
                f"fill_({value}) cannot change a DTensor that is pending as {placement}; fill "
                "tensor.redistribute(placements=...), or the whole, tensor.full_tensor()"
            )
        if index > 0 and _FILLED[kind] is not None:
            value = _FILLED[kind]
    local_of_dtensor(tensor).fill_(value)
    return tensor


def _reduce_all_dims() -> None:
    """Let no dims be all of them, as in `sum([])` and in the gradient of `amax()`, where torch left the sum of a part."""
    module: Any = _math_ops
    of_dims = module._infer_reduction_dims
    module._infer_reduction_dims = lambda dims, ndim: None if dims == [] else of_dims(dims, ndim)


def _fill_as_placed() -> None:
    """Let a tensor be filled as it is placed: torch 2.14 refuses that of norms and products, as their rules are of one dim."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for op in (aten.fill_.Scalar, aten.zero_.default):
        if propagator.op_single_dim_strategy_funcs.pop(op, None) is not None:
            propagator.register_op_strategy(op, _as_placed)


def _as_placed(call: Any) -> OpStrategy:
    placed = call.args_schema[0].strategies
    costs = [[0.0] * len(placed)]
    return OpStrategy([OpSpec(one.output_spec, (one.output_spec,), redistribute_cost=costs) for one in placed])
