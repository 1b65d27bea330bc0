"""Sharding rules of convolutions: batch and channels are carried or summed over.

Positions may be sharded where each result has one stride of inputs: a rank gets the positions that its kernel reaches from its
neighbours (`local_forms.halo`), and the gradient of the kernel is a sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from passes.ir.collectives import SEND
from passes.ir.graph import tensor_of
from passes.rules.factors import Dim, Factors
from passes.rules.local_forms.halo import Halo, extended, folded
from passes.rules.rule import Call, Linear, LocalCall, Reach, Space, register

aten = torch.ops.aten


def _convolution(call: Call) -> Space | None:
    """Return the space of batch `n`, groups `g`, and a group's input channels `i` (summed over) and output channels
    `o`."""
    if call.arg("input").ndim != call.arg("weight").ndim:
        return None
    has_bias = call.arg("bias") is not None
    factors, value, weight, channels, positions = _dims(call, call.result.shape[2:], bias=has_bias)
    operands = [value, weight, *([channels] if has_bias else [])]
    with_bias = (2,) if has_bias else ()
    out = [value[0], *channels, *positions]
    return factors.space(operands, [out], linear=(Linear((0, *with_bias)), Linear((1, *with_bias))))


def _convolution_backward(call: Call) -> Space | None:
    """Return the space of a backward, which gives those of `(grad_input, grad_weight, grad_bias)` that are
    requested."""
    if call.arg("input").ndim != call.arg("weight").ndim:
        return None
    mask = call.arg("output_mask")
    factors, value, weight, channels, positions = _dims(call, call.arg("grad_output").shape[2:], bias=mask[2])
    results = [dims for dims, asked in zip((value, weight, channels), mask, strict=True) if asked]
    return factors.space([[value[0], *channels, *positions], value, weight], results, linear=(Linear((0,)),))


def _dims(
    call: Call, made: Sequence[int], *, bias: bool
) -> tuple[Factors, list[Dim], list[Dim], list[Dim], list[Dim]]:
    """Return the factors, and the dims of the input, of the weight, of the output's channels and of its positions, of which
    there are `made`.

    With a bias, `i` cannot be sharded: every rank would add the bias, and its gradient is no sum over `i`.
    """
    value, weight, groups = call.arg("input").shape, call.arg("weight").shape, call.arg("groups")
    factors = Factors()
    batch, group = factors.one("n", value[0]), factors.one("g", groups)
    inner = factors.one("i", value[1] // groups, blocked=bias)
    outer = factors.one("o", weight[1] if call.arg("transposed") else weight[0] // groups)
    kernel = factors.dims(weight[2:], blocked=range(len(weight)), prefix="k")
    across = [(*group, *inner), outer] if call.arg("transposed") else [(*group, *outer), inner]
    pairs = [_positions(call, factors, number, length) for number, length in enumerate(made)]
    return (
        factors,
        [batch, (*group, *inner), *(given for given, _ in pairs)],
        [*across, *kernel],
        [(*group, *outer)],
        [results for _, results in pairs],
    )


def _positions(call: Call, factors: Factors, number: int, made: int) -> tuple[Dim, Dim]:
    """Return the dims of a position's inputs and results.

    The forward sends inputs, which are kept; the backward sends gradients, of their size.
    """
    is_forward = call.op is aten.convolution.default
    sent = (0,) if is_forward else (1,) if call.arg("output_mask")[0] else ()
    reach, stride = _reach(call, number, made), _setting(call, "stride", number)
    if reach is None:
        given = factors.one(f"p{number}", call.arg("input").shape[2 + number], blocked=True)
        return given, factors.one(f"q{number}", made, blocked=True)
    results = factors.one(f"q{number}", made)
    for factor in results:
        sends = tuple((SEND.name, operand, count) for operand in sent for count in reach if count)
        factors.reach(factor, Reach(-(-max(reach) // stride), sends))
    return (*results, *factors.one(f"w{number}", stride, blocked=True)), results


def _reach(call: Call, number: int, made: int) -> tuple[int, int] | None:
    """Return how many inputs before and after those of a part its results reach; None if no part has inputs of its own."""
    stride, padding = _setting(call, "stride", number), _setting(call, "padding", number)
    if call.arg("transposed") or made * stride != call.arg("input").shape[2 + number]:
        return None
    kernel = _setting(call, "dilation", number) * (call.arg("weight").shape[2 + number] - 1)
    return padding, max(0, kernel - padding - (stride - 1))


def _setting(call: Call, name: str, number: int) -> int:
    """Return a setting for one of the dims of positions; a single one stands for all."""
    values = call.arg(name)
    return int(values[number if len(values) > 1 else 0])


def _halos(call: LocalCall, operand: int, made: Sequence[int]) -> tuple[list[Halo], list[int]]:
    """Return the halos of sharded positions, and the padding that is left for the kernel."""
    layout, halos, padding = call.operand_layout(operand), list[Halo](), list[int]()
    for number, length in enumerate(made):
        axes = layout.axes_on(2 + number)
        reach = _reach(call.call, number, length) if axes else None
        if reach is not None:
            halos.append(Halo(2 + number, axes[0], *reach))
        padding.append(_setting(call.call, "padding", number) if reach is None else 0)
    return halos, padding


def _convolution_local(call: LocalCall) -> Node:
    """Convolve with the groups of this rank's part."""
    value, weight, bias, stride, _, *others = call.args[:8]
    halos, padding = _halos(call, 0, call.call.result.shape[2:])
    groups = _local_groups(call, value, weight, out_channels=call.local_shape()[1])
    for halo in halos:
        value = extended(call, value, halo)
    return call.emit(call.call.op, value, weight, bias, stride, padding, *others, groups)


def _convolution_backward_local(call: LocalCall) -> Node | tuple[Node, ...]:
    """Compute the gradients with the groups and the bias size of this rank's part."""
    grad, value, weight, bias, stride, _, *others = call.args[:9]
    mask = call.call.arg("output_mask")
    out_channels = tensor_of(grad).shape[1]
    groups = _local_groups(call, value, weight, out_channels=out_channels)
    sizes = None if bias is None else [out_channels]
    halos, padding = _halos(call, 1, call.call.operands[0].shape[2:])
    for halo in halos:
        value = extended(call, value, halo)
    made = call.emit(call.call.op, grad, value, weight, sizes, stride, padding, *others, groups, *call.args[10:])
    if not halos or not mask[0]:
        return made
    of_input, *rest = (call.item(made, number) for number, asked in enumerate(mask) if asked)
    for halo in reversed(halos):
        of_input = folded(call, of_input, halo)
    return of_input, *rest


def _local_groups(call: LocalCall, value: Node, weight: Node, *, out_channels: int) -> int:
    """Return the number of groups in this rank's part.

    A weight's second dim is the channels of one group: of the input, or of the output if the convolution is transposed.
    """
    channels = out_channels if call.call.arg("transposed") else tensor_of(value).shape[1]
    return channels // tensor_of(weight).shape[1]


register(aten.convolution.default, space=_convolution, local=_convolution_local)
register(aten.convolution_backward.default, space=_convolution_backward, local=_convolution_backward_local)
