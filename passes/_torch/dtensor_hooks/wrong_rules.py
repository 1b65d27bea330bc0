"""Compute what DTensor gets wrong of sharded tensors: sums of norms, means of losses, sums along a last dim, maxima with NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from passes._torch.dtensor import shard_of
from passes._torch.dtensor_hooks.empty_parts import as_usual
from passes._torch.dtensor_hooks.pending_parts import reduce_pending_parts, reduced
from passes._torch.dtensor_hooks.whole_weights import CONVOLUTIONS
from passes._torch.patches import once

aten = torch.ops.aten
_Handler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]

_SUMS = aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.any.default, aten.any.dim, aten.any.dims
_CUMULATIVE = aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default
_LOSSES = aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss, aten.soft_margin_loss, aten.binary_cross_entropy
_LOSSES_BACKWARD = (
    aten.mse_loss_backward,
    aten.huber_loss_backward,
    aten.smooth_l1_loss_backward,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy_backward,
)
_LOSSES_FORWARD = *_LOSSES, aten.binary_cross_entropy_with_logits
_MEAN, _SUM = 1, 2  # ATen's numbers of reductions


def correct_wrong_rules() -> None:
    """Let results that torch silently computes from parts be one device's.

    torch takes `weight.norm(dim=0).sum()` for a sum of parts' norms, as norms that are still in parts look like sums to it, and
    counts `(weight > 0).any(1).sum()` twice for the same reason. The mean of `mse_loss` is one of parts' means, and its gradient
    is divided by the elements of a part. `cumsum(-1)` of a tensor whose last dim is sharded starts again in each part. The
    largest of all parts is a number, though another rank's part has NaN.
    """
    once("DTensor's wrong rules", _put_in_handlers)


def _put_in_handlers() -> None:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    corrected: tuple[tuple[Callable[..., Any], list[Any]], ...] = (
        (_summed, list(_SUMS)),
        (_accumulated, list(_CUMULATIVE)),
        (_mean_of_sum, [loss.default for loss in _LOSSES_FORWARD]),
        (_gradient_of_sum, [loss.default for loss in _LOSSES_BACKWARD]),
    )
    for corrects, ops in corrected:
        for op in ops:
            handlers[op] = partial(corrects, handlers.get(op, as_usual))
    handlers.update(CONVOLUTIONS)
    reduce_pending_parts()
    _keep_nan()


def _keep_nan() -> None:
    """Let the largest or least of all ranks be NaN where a rank has NaN, which backends leave out, gloo among them."""
    reduced: Any = Partial._reduce_value

    def with_nan(self: Partial, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> Any:
        if self.reduce_op not in ("max", "min") or not tensor.is_floating_point():
            return reduced(self, tensor, mesh, mesh_dim)
        is_nan = tensor.isnan()
        worst = math.inf if self.reduce_op == "max" else -math.inf
        marks = torch.where(is_nan, worst, 0.0).to(tensor.dtype)  # in the same collective
        both = reduced(self, torch.stack([tensor.masked_fill(is_nan, -worst), marks]), mesh, mesh_dim)
        return torch.where(both[1] == 0, both[0], math.nan)

    Partial._reduce_value = with_nan  # type: ignore[method-assign]


def _summed(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Sum a tensor that is no sum of parts, as norms and truth values are not, when the parts are one."""
    tensor = args[0]
    if any(placement.is_partial() and not _adds_up(placement, tensor) for placement in tensor.placements):
        return op(reduced(tensor), *args[1:], **kwargs)
    return usual(op, args, kwargs)


def _adds_up(placement: Any, tensor: DTensor) -> bool:
    is_norm = getattr(placement, "norm_type", 1) != 1
    return not is_norm and tensor.dtype != torch.bool


def _accumulated(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Count a dim from the first, as torch compares it with that of a shard."""
    tensor, dim = args[:2]
    return usual(op, (tensor, dim % max(tensor.ndim, 1), *args[2:]), kwargs)


def _mean_of_sum(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = _bound(op, args, kwargs)
    if not _is_mean_of_parts(given):
        return usual(op, args, kwargs)
    return op(**{**given, "reduction": _SUM}) / _numel(given)


def _gradient_of_sum(usual: _Handler, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = _bound(op, args, kwargs)
    if not _is_mean_of_parts(given):
        return usual(op, args, kwargs)
    return op(**{**given, "grad_output": given["grad_output"] / _numel(given), "reduction": _SUM})


def _bound(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, with the defaults of those that have one."""
    names = [argument.name for argument in op._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _is_mean_of_parts(given: Mapping[str, Any]) -> bool:
    tensors = [given["self"], given["target"]]
    placements = [one for tensor in tensors if isinstance(tensor, DTensor) for one in tensor.placements]
    return given["reduction"] == _MEAN and any(shard_of(placement) is not None for placement in placements)


def _numel(given: Mapping[str, Any]) -> int:
    shape: torch.Size = torch.broadcast_shapes(given["self"].shape, given["target"].shape)  # type: ignore[no-untyped-call]
    return shape.numel()
