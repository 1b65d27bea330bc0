"""Read numbers of DTensors as those of all ranks, let `tensor.data = other` change a DTensor, and draw one device's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher

from passes._torch.dtensor import is_on_every_rank, local_of_dtensor, relay_dtensor, written_arguments
from passes._torch.dtensor_hooks.empty_parts import as_usual
from passes._torch.fake import is_fake
from passes._torch.patches import once
from passes._torch.pytree import map_pytree


def read_numbers(whole_of: Callable[[DTensor], torch.Tensor]) -> None:
    """Let `item()`, and with it `bool()`, `float()` and `f"{norm:.3f}"`, of a DTensor read what `whole_of` returns.

    torch reads this rank's part: `p.grad.norm().item()` is the norm of a part, and with `if p.grad.isnan().any()` ranks take
    different branches, without an error.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    read = torch.compiler.disable(lambda op, args, kwargs: op(whole_of(args[0])))  # type: ignore[no-untyped-call]
    handlers[torch.ops.aten._local_scalar_dense.default] = read  # also where a function that is compiled calls item()
    once("DTensor's format", _format_numbers)


def _format_numbers() -> None:
    written: Any = DTensor.__format__

    def formatted(self: DTensor, spec: str) -> str:
        is_number = self.dim() == 0 and (spec or is_on_every_rank(self))  # without a format, ranks' parts are shown as they are
        return format(self.item(), spec) if is_number else str(written(self, spec))

    DTensor.__format__ = formatted  # type: ignore[method-assign, assignment]


def assign_data(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `parameter.data = tensor` change a DTensor, which torch silently leaves as it was.

    torch changes the tensor that a DTensor shows, not the part that it holds. `laid_out_as` cuts a whole tensor as a DTensor is.
    The new part is held, not copied into the old one, which `parameter.data` may have been kept of.
    """
    once("DTensor's data", lambda: _hold_assigned_data(laid_out_as))


def _hold_assigned_data(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    shown: Any = DTensor.data

    def assign(self: DTensor, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"the .data of a DTensor of shape {tuple(self.shape)} takes a tensor of that shape, but this one is "
                f"{tuple(value.shape)}; give the whole tensor or a DTensor, or replace the parameter by a new nn.Parameter"
            )
        given = laid_out_as(value, self)
        shown.__set__(self, given)
        relay_dtensor(self, local_of_dtensor(given), given._spec)

    DTensor.data = property(shown.__get__, assign)  # type: ignore[assignment]


def draw_whole(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `normal_()`, `randn_like` and the other random ops of a DTensor on CPU draw one device's numbers.

    On CPU, torch draws each rank's part from the same state, so that all parts have the same numbers, and leaves out a generator
    that it is given. Here, each rank draws the whole and keeps its part, which `laid_out_as` cuts.
    """
    once("DTensor's random ops", lambda: _draw_whole(laid_out_as))


def _draw_whole(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    name = "_dispatch_get_local_results_slow_path"
    of_part: Any = getattr(OpDispatcher, name)

    def drawn(self: OpDispatcher, op: Any, args: tuple[Any, ...], info: Any) -> Any:
        is_moved = info.output_sharding.needs_redistribute and not written_arguments(op)  # before it is drawn for
        if op not in self._random_ops or is_moved or not _has_parts_on_cpu(args[0]):
            return of_part(self, op, args, info)
        tensor, local = args[0], local_of_dtensor(args[0])
        is_read = not (written_arguments(op) or op in _LIKE)
        whole = tensor.full_tensor() if is_read else torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device
        )
        results = op(whole, *args[1:], **info.local_kwargs)
        parts = map_pytree(lambda one: local_of_dtensor(laid_out_as(one, tensor)), results)
        return local.copy_(parts) if written_arguments(op) else parts

    setattr(OpDispatcher, name, torch.compiler.disable(drawn))  # type: ignore[no-untyped-call]
    DTensor._op_dispatcher._random_ops.update(_DRAWN_AS_OTHERS)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for op in _DRAWN_AS_OTHERS:
        handlers[op] = _drawn_as_others
    for op in (torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default):
        handlers[op] = torch.compiler.disable(partial(_leaked, laid_out_as))  # type: ignore[no-untyped-call]


def _drawn_as_others(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Dispatch a random op from Python, as torch's fast path keeps a list of its own."""
    is_written = bool(written_arguments(op))
    if is_written and any(placement.is_partial() for placement in args[0].placements):
        raise RuntimeError(f"{op} cannot change a DTensor that is a sum of parts; give tensor.redistribute(...) or the whole")
    result = as_usual(op, args, kwargs)
    return args[0] if is_written else result


def _leaked(
    laid_out_as: Callable[[torch.Tensor, DTensor], DTensor], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Draw the slopes of all parts of a randomized leaky ReLU, which torch keeps in a tensor that it is given."""
    tensor, noise, *settings = args
    is_drawn = len(settings) > _TRAINS and settings[_TRAINS]
    if not (is_drawn and _has_parts_on_cpu(tensor)):
        return as_usual(op, args, kwargs)
    slopes = noise.full_tensor()
    result = laid_out_as(op(tensor.full_tensor(), slopes, *settings, **kwargs), tensor)
    local_of_dtensor(noise).copy_(local_of_dtensor(laid_out_as(slopes, noise)))
    if op is torch.ops.aten.rrelu_with_noise.default:
        return result
    local_of_dtensor(tensor).copy_(local_of_dtensor(result))
    return tensor


_TRAINS = 2  # the place of `training` behind the tensors
_DRAWN_AS_OTHERS = {
    torch.ops.aten.exponential_.default,
    torch.ops.aten.cauchy_.default,
    torch.ops.aten.log_normal_.default,
    torch.ops.aten.geometric_.default,
    torch.ops.aten.multinomial.default,
}  # random ops that torch has a rule for, but takes for others
_LIKE = {
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
}  # random ops that read a tensor's shape only


def _has_parts_on_cpu(tensor: object) -> bool:
    """Return whether it is a DTensor on CPU whose parts have values, unlike those that a function is compiled with."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.device_type != "cpu" or is_fake(local_of_dtensor(tensor)):
        return False
    return not any(placement.is_partial() for placement in tensor.placements)
