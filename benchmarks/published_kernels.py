"""Kernels that Megatron-LM ran in 2021, each apart: Inductor, which fuses what is next to each other, leaves custom ops alone.

The stack of arXiv 2104.04473 had kernels of its own for the norm (its backward in two kernels), the dropout of attention, and
dropout with the add of the residual; torch 1.8 added the bias of a product of three dims in a pass of its own. They are
counted by what they read and write; a mask is a byte an element.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import autoshard


@torch.library.custom_op("autoshard_published::dropout", mutates_args=())
def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return x with elements dropped, and the mask of those kept."""
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    return x * kept / (1 - p), kept


@torch.library.custom_op("autoshard_published::drop_and_add", mutates_args=())
def drop_and_add(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return x + bias with elements dropped, plus the residual, and the mask of those kept."""
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    return residual + (x + bias) * kept / (1 - p), kept


@torch.library.custom_op("autoshard_published::dropout_backward", mutates_args=())
def dropout_backward(gradient: Tensor, kept: Tensor, p: float) -> Tensor:
    return gradient * kept / (1 - p)


@torch.library.custom_op("autoshard_published::add_bias", mutates_args=())
def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


@torch.library.custom_op("autoshard_published::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@torch.library.custom_op("autoshard_published::norm_backward", mutates_args=())
def norm_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    given = gradient * weight
    normal = F.layer_norm(x, x.shape[-1:])
    centred = given - given.mean(-1, keepdim=True) - normal * (given * normal).mean(-1, keepdim=True)
    return centred / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


@torch.library.custom_op("autoshard_published::norm_parameters", mutates_args=())
def norm_parameters(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias."""
    return (gradient * F.layer_norm(x, x.shape[-1:])).sum((0, 1)), gradient.sum((0, 1))


def _same_and_mask(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _same(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


dropout.register_fake(_same_and_mask)
drop_and_add.register_fake(_same_and_mask)
for op in (dropout_backward, add_bias, norm, norm_backward):
    op.register_fake(_same)
norm_parameters.register_fake(lambda gradient, x: (x.new_empty(x.shape[-1]), x.new_empty(x.shape[-1])))


def _keep_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.p, ctx.kept = inputs[-1], output[1]


def _keep_operands(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _norm_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return norm_backward(gradient, x, weight), *norm_parameters(gradient, x)


def _added_gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dropped = dropout_backward(gradient, ctx.kept, ctx.p)
    return dropped, dropped.sum((0, 1)), gradient, None


dropout.register_autograd(
    lambda ctx, gradient, _: (dropout_backward(gradient, ctx.kept, ctx.p), None), setup_context=_keep_mask
)
drop_and_add.register_autograd(_added_gradients, setup_context=_keep_mask)
add_bias.register_autograd(lambda ctx, gradient: (gradient, gradient.sum((0, 1))))
norm.register_autograd(_norm_gradients, setup_context=_keep_operands)

rule, ops = autoshard.rule, torch.ops.autoshard_published
rule(ops.dropout.default)("a b c -> a b c, a b c")
rule(ops.dropout_backward.default)("a b c, a b c -> a b c")
rule(ops.drop_and_add.default)("s b d, d, s b d -> s b d, s b d")
rule(ops.add_bias.default)("s b d, d -> s b d")
rule(ops.norm.default, linear=False)("s b d!, d!, d! -> s b d!")
rule(ops.norm_backward.default, linear=False)("s b d!, s b d!, d! -> s b d!")
rule(ops.norm_parameters.default, linear=False)("s b d, s b d -> d, d")
