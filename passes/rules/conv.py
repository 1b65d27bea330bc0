"""Sharding rules of convolutions: batch and channels are carried or summed over, positions stay whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.rules.factors import Dim, Factors
from passes.rules.rule import Call, Linear, LocalCall, Space, register

aten = torch.ops.aten


def _convolution(call: Call) -> Space | None:
    """Return the space of batch `n`, groups `g`, and a group's input channels `i` (summed over) and output channels
    `o`."""
    if call.arg("input").ndim != call.arg("weight").ndim:
        return None
    has_bias = call.arg("bias") is not None
    factors, value, weight, channels = _channels(call, bias=has_bias)
    out = [value[0], *channels, *_positions(factors, "q", call.result.shape[2:])]
    operands = [value, weight, *([channels] if has_bias else [])]
    with_bias = (2,) if has_bias else ()
    return factors.space(operands, [out], linear=(Linear((0, *with_bias)), Linear((1, *with_bias))))


def _convolution_backward(call: Call) -> Space | None:
    """Return the space of a backward, which gives those of `(grad_input, grad_weight, grad_bias)` that are
    requested."""
    if call.arg("input").ndim != call.arg("weight").ndim:
        return None
    mask = call.arg("output_mask")
    factors, value, weight, channels = _channels(call, bias=mask[2])
    out = [value[0], *channels, *_positions(factors, "q", call.arg("grad_output").shape[2:])]
    results = [dims for dims, asked in zip((value, weight, channels), mask, strict=True) if asked]
    return factors.space([out, value, weight], results, linear=(Linear((0,)),))


def _channels(call: Call, *, bias: bool) -> tuple[Factors, list[Dim], list[Dim], list[Dim]]:
    """Return the factors, and the dims of the input, of the weight and of the output's channels.

    With a bias, `i` cannot be sharded: every rank would add the bias, and its gradient is no sum over `i`.
    """
    value, weight, groups = call.arg("input").shape, call.arg("weight").shape, call.arg("groups")
    factors = Factors()
    batch, group = factors.one("n", value[0]), factors.one("g", groups)
    inner = factors.one("i", value[1] // groups, blocked=bias)
    outer = factors.one("o", weight[1] if call.arg("transposed") else weight[0] // groups)
    kernel = _positions(factors, "k", weight[2:])
    across = [(*group, *inner), outer] if call.arg("transposed") else [(*group, *outer), inner]
    return (
        factors,
        [batch, (*group, *inner), *_positions(factors, "p", value[2:])],
        [*across, *kernel],
        [(*group, *outer)],
    )


def _positions(factors: Factors, prefix: str, shape: Sequence[int]) -> list[Dim]:
    return factors.dims(shape, blocked=range(len(shape)), prefix=prefix)


def _convolution_local(call: LocalCall) -> Node:
    """Convolve with the groups of this rank's part."""
    groups = _local_groups(call, call.args[0], call.args[1], out_channels=call.local_shape()[1])
    return call.emit(call.call.op, *call.args[:8], groups)


def _convolution_backward_local(call: LocalCall) -> Node:
    """Compute the gradients with the groups and the bias size of this rank's part."""
    grad, value, weight, bias = call.args[:4]
    out_channels = tensor_of(grad).shape[1]
    groups = _local_groups(call, value, weight, out_channels=out_channels)
    sizes = None if bias is None else [out_channels]
    return call.emit(call.call.op, grad, value, weight, sizes, *call.args[4:9], groups, *call.args[10:])


def _local_groups(call: LocalCall, value: Node, weight: Node, *, out_channels: int) -> int:
    """Return the number of groups in this rank's part.

    A weight's second dim is the channels of one group: of the input, or of the output if the convolution is transposed.
    """
    channels = out_channels if call.call.arg("transposed") else tensor_of(value).shape[1]
    return channels // tensor_of(weight).shape[1]


register(aten.convolution.default, space=_convolution, local=_convolution_local)
register(aten.convolution_backward.default, space=_convolution_backward, local=_convolution_backward_local)
