"""The CTC loss and a selection by a mask as operators of fixed shapes.

Torch's CTC loss keeps a tensor for its backward that is as long as the longest target: its shape depends on values.
`autoshard::ctc_loss` returns the gradient with the losses instead, which is as large as its first operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LIBRARIES: Any = torch.library  # not typed
_LIBRARY = _LIBRARIES.Library("autoshard", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)"
)
_LIBRARY.define("masked_select(Tensor x, Tensor mask) -> Tensor")


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sequence, and its gradient by `log_probs` of shape [time, batch, classes].

    Targets are of shape [batch, longest], or all in one row, which may be longer than they are.
    """
    given = (input_lengths.long(), target_lengths.long())
    if targets.dim() == 1:
        targets = targets[: int(target_lengths.sum())]
    losses, alphas = aten._ctc_loss.Tensor(log_probs, targets, *given, blank, zero_infinity)
    ones = torch.ones_like(losses)
    gradient = aten._ctc_loss_backward.Tensor(ones, log_probs, targets, *given, losses, alphas, blank, zero_infinity)
    if zero_infinity:
        losses = losses.masked_fill(losses.isinf(), 0)
    return losses, gradient.contiguous()


def _ctc_shapes(log_probs: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


def _keep_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _ctc_backward(context: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    (of_each,) = context.saved_tensors
    return gradient[:, None] * of_each, *[None] * 5


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Return the elements that a mask selects and zeros after them, as many as the mask has elements."""
    broadcast: Any = torch.broadcast_shapes
    shape = broadcast(x.shape, mask.shape)
    flat, chosen = x.expand(shape).reshape(-1), mask.expand(shape).reshape(-1)
    places = torch.where(chosen, chosen.cumsum(0) - 1, flat.numel())
    return flat.new_zeros(flat.numel() + 1).scatter(0, places, flat)[:-1]


_LIBRARY.impl("ctc_loss", _ctc_loss, "CPU")
_LIBRARY.impl("ctc_loss", _ctc_loss, "CUDA")
_LIBRARY.impl("ctc_loss", _ctc_shapes, "Meta")
_LIBRARY.impl("masked_select", _masked_select, "CompositeImplicitAutograd")
_LIBRARIES.register_autograd("autoshard::ctc_loss", _ctc_backward, setup_context=_keep_gradient, lib=_LIBRARY)

CTC_LOSS = torch.ops.autoshard.ctc_loss.default
MASKED_SELECT = torch.ops.autoshard.masked_select.default
