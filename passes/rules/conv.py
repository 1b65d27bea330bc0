"""Sharding rules of convolutions: batch and channels are carried or summed over.

Positions may be sharded where each result has one stride of inputs: a rank gets the positions that its kernel reaches from its
neighbours (`local_forms.halo`), and the gradient of the kernel is a sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes._torch import ALIGNED_CONVOLUTION, ALIGNED_CONVOLUTION_INPUT, ALIGNED_CONVOLUTION_WEIGHT
from passes.ir.call import Call, Tensor
from passes.ir.collectives import SEND
from passes.ir.graph import tensor_of
from passes.rules.factors import Dim, Factors
from passes.rules.local_forms.halo import Halo, extended, folded
from passes.rules.rule import Linear, LocalCall, Reach, Space, register

aten = torch.ops.aten


def is_convolution(op: object) -> bool:
    """Return whether `op` is the forward of a convolution."""
    return op in (aten.convolution.default, ALIGNED_CONVOLUTION)


@dataclass(frozen=True)
class _Convolution:
    """The shapes of a convolution's input, weight and result, of which a call has two and gives the third, or all."""

    value: tuple[int, ...]
    weight: tuple[int, ...]
    made: tuple[int, ...]
    call: Call

    @property
    def is_transposed(self) -> bool:
        return not _is_aligned(self.call) and bool(self.call.arg("transposed"))

    def setting(self, name: str, number: int) -> int:
        """Return a setting for one of the dims of positions; a single one stands for all."""
        values = self.call.arg(name)
        return int(values[number if len(values) > 1 else 0])

    def reach(self, number: int) -> tuple[int, int] | None:
        """Return how many inputs before and after those of a part its results reach; None if no part has inputs of its
        own."""
        stride, padding = self.setting("stride", number), self.setting("padding", number)
        if self.is_transposed or self.made[2 + number] * stride != self.value[2 + number]:
            return None
        kernel = self.setting("dilation", number) * (self.weight[2 + number] - 1)
        return padding, max(0, kernel - padding - (stride - 1))


def _is_aligned(call: Call) -> bool:
    return call.op in (ALIGNED_CONVOLUTION, ALIGNED_CONVOLUTION_INPUT, ALIGNED_CONVOLUTION_WEIGHT)


def _of(call: Call) -> _Convolution:
    named = {parameter.name for parameter in call.op._schema.arguments}
    made = call.arg("grad_output") if "grad_output" in named else call.result
    value = call.arg("input") if "input" in named else call.result
    return _Convolution(value.shape, call.arg("weight").shape, made.shape, call)


@dataclass(frozen=True)
class _Dims:
    """The factors of a convolution, and the dims of its input, weight and result."""

    factors: Factors
    value: list[Dim]
    weight: list[Dim]
    made: list[Dim]

    @property
    def channels(self) -> list[Dim]:
        """Return the dims of the bias."""
        return [self.made[1]]


def _dims(one: _Convolution, *, bias: bool = False, sent: Sequence[int] = ()) -> _Dims:
    """Return the dims: batch `n`, groups `g`, and a group's input channels `i` (summed over) and output channels `o`.

    With a bias, `i` cannot be sharded: every rank would add the bias, and its gradient is no sum over `i`. `sent` are operands
    whose ends are sent, or values of their size.
    """
    value, weight, groups = one.value, one.weight, one.call.arg("groups")
    factors = Factors()
    batch, group = factors.one("n", value[0]), factors.one("g", groups)
    inner = factors.one("i", value[1] // groups, blocked=bias)
    outer = factors.one("o", weight[1] if one.is_transposed else weight[0] // groups)
    kernel = factors.dims(weight[2:], blocked=range(len(weight)), prefix="k")
    across = [(*group, *inner), outer] if one.is_transposed else [(*group, *outer), inner]
    pairs = [_positions(one, factors, number, sent) for number in range(len(one.made) - 2)]
    return _Dims(
        factors,
        [batch, (*group, *inner), *(given for given, _ in pairs)],
        [*across, *kernel],
        [batch, (*group, *outer), *(results for _, results in pairs)],
    )


def _positions(one: _Convolution, factors: Factors, number: int, sent: Sequence[int]) -> tuple[Dim, Dim]:
    """Return the dims of a position's inputs and results."""
    reach, stride, made = one.reach(number), one.setting("stride", number), one.made[2 + number]
    if reach is None:
        given = factors.one(f"p{number}", one.value[2 + number], blocked=True)
        return given, factors.one(f"q{number}", made, blocked=True)
    results = factors.one(f"q{number}", made)
    for factor in results:
        sends = tuple((SEND.name, operand, count) for operand in sent for count in reach if count)
        factors.reach(factor, Reach(-(-max(reach) // stride), sends))
    return (*results, *factors.one(f"w{number}", stride, blocked=True)), results


def _is_batched(call: Call) -> bool:
    """Return whether the input has a dim of batch, as the weight has one of output channels."""
    values = [call.arg(p.name) for p in call.op._schema.arguments if p.name in ("input", "grad_output", "weight")]
    return len({value.ndim for value in values if isinstance(value, Tensor)}) == 1


def _convolution(call: Call) -> Space | None:
    if not _is_batched(call):
        return None
    has_bias = call.arg("bias") is not None
    dims = _dims(_of(call), bias=has_bias, sent=(0,))
    operands = [dims.value, dims.weight, *([dims.channels] if has_bias else [])]
    with_bias = (2,) if has_bias else ()
    return dims.factors.space(operands, [dims.made], linear=(Linear((0, *with_bias)), Linear((1, *with_bias))))


def _convolution_backward(call: Call) -> Space | None:
    """Return the space of a backward, which gives those of `(grad_input, grad_weight, grad_bias)` that are requested.

    The ends of inputs were sent in the forward, and are kept; those of their gradients are sent.
    """
    if not _is_batched(call):
        return None
    mask = call.arg("output_mask")
    dims = _dims(_of(call), bias=mask[2], sent=(1,) if mask[0] else ())
    results = [one for one, asked in zip((dims.value, dims.weight, dims.channels), mask, strict=True) if asked]
    return dims.factors.space([dims.made, dims.value, dims.weight], results, linear=(Linear((0,)),))


def _aligned(call: Call) -> Space:
    dims = _dims(_of(call), sent=(0,))
    return dims.factors.space([dims.value, dims.weight], [dims.made], linear=(Linear((0,)), Linear((1,))))


def _aligned_input(call: Call) -> Space:
    dims = _dims(_of(call), sent=(0,))
    return dims.factors.space([dims.made, dims.weight], [dims.value], linear=(Linear((0,)), Linear((1,))))


def _aligned_weight(call: Call) -> Space:
    """Return the space of a weight's gradient, which reads the shape of the weight alone."""
    dims = _dims(_of(call))
    return dims.factors.space([dims.made, dims.value, dims.weight], [dims.weight], linear=(Linear((0,)), Linear((1,))))


def _halos(call: LocalCall, operand: int) -> tuple[list[Halo], list[int]]:
    """Return the halos of positions that are sharded in an operand, and the padding that is left for the kernel."""
    layout, one, halos, padding = call.operand_layout(operand), _of(call.call), list[Halo](), list[int]()
    for number in range(len(one.made) - 2):
        axes = layout.axes_on(2 + number)
        reach = one.reach(number) if axes else None
        if reach is not None:
            halos.append(Halo(2 + number, axes[0], *reach))
        padding.append(one.setting("padding", number) if reach is None else 0)
    return halos, padding


def _convolution_local(call: LocalCall) -> Node:
    """Convolve with the groups of this rank's part."""
    value, weight, bias, stride, _, *others = call.args[:8]
    halos, padding = _halos(call, 0)
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
    halos, padding = _halos(call, 1)
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
    channels = out_channels if _of(call.call).is_transposed else tensor_of(value).shape[1]
    return int(channels // tensor_of(weight).shape[1])


class _Aligned:
    """The calls that an aligned convolution becomes on one rank."""

    def __init__(self, call: LocalCall, operand: int) -> None:
        self.call, self.one = call, _of(call.call)
        self.halos, _ = _halos(call, operand)
        self.stride, self.dilation = call.call.arg("stride"), call.call.arg("dilation")
        self.pads: list[tuple[int, int]] = []  # by dim of positions; halos stand in their place where they are sharded
        for number in range(len(self.stride)):
            reach = self.one.reach(number)
            assert reach is not None, call.call
            self.pads.append((0, 0) if any(halo.dim == 2 + number for halo in self.halos) else reach)

    def convolve(self, value: Node, weight: Node, *others: Any, op: Any = aten.convolution.default) -> Node:
        groups = tensor_of(value).shape[1] // tensor_of(weight).shape[1]
        none = [0] * len(self.stride)
        operands = (value, weight) if op is aten.convolution.default else (*others[:1], value, weight)
        return self.call.emit(op, *operands, None, self.stride, none, self.dilation, False, none, groups, *others[1:])

    def extended(self, value: Node) -> Node:
        """Return inputs with all that results reach."""
        for halo in self.halos:
            value = extended(self.call, value, halo)
        return self._padded(value, self.pads)

    def of_input(self, grad: Node, weight: Node) -> Node:
        """Return the gradient of the inputs: a transposed convolution, without what stands for no input."""
        left, none = list[int](), [0] * len(self.stride)
        for number, stride in enumerate(self.stride):
            reach = self.one.reach(number)
            assert reach is not None
            left.append(stride + sum(reach) - self.dilation[number] * (self.one.weight[2 + number] - 1) - 1)
        groups = self.call.local_shape()[1] // tensor_of(weight).shape[1]
        wide = self.call.emit(
            aten.convolution.default, grad, weight, None, self.stride, none, self.dilation, True, left, groups
        )
        wide = self._padded(wide, [(-before, -after) for before, after in self.pads])
        for halo in reversed(self.halos):
            wide = folded(self.call, wide, halo)
        return wide

    def _padded(self, value: Node, pads: list[tuple[int, int]]) -> Node:
        if not any(map(any, pads)):
            return value
        flat = [length for pair in reversed(pads) for length in pair]
        return self.call.emit(aten.constant_pad_nd.default, value, flat, 0)


def _aligned_local(call: LocalCall) -> Node:
    one = _Aligned(call, 0)
    return one.convolve(one.extended(call.args[0]), call.args[1])


def _aligned_input_local(call: LocalCall) -> Node:
    return _Aligned(call, 0).of_input(*call.args[:2])


def _aligned_weight_local(call: LocalCall) -> Node:
    one = _Aligned(call, 1)
    grad, value, weight = call.args[:3]
    mask = [False, True, False]
    made = one.convolve(one.extended(value), weight, grad, mask, op=aten.convolution_backward.default)
    return call.item(made, 1)


register(aten.convolution.default, space=_convolution, local=_convolution_local)
register(aten.convolution_backward.default, space=_convolution_backward, local=_convolution_backward_local)
register(ALIGNED_CONVOLUTION, space=_aligned, local=_aligned_local, whole=True)
register(ALIGNED_CONVOLUTION_INPUT, space=_aligned_input, local=_aligned_input_local, whole=True)
register(ALIGNED_CONVOLUTION_WEIGHT, space=_aligned_weight, local=_aligned_weight_local, whole=True)
