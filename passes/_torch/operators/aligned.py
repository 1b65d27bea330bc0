"""Convolutions whose results are aligned with their inputs: one result for each stride of inputs.

`padding` is what stands before the first input; what has to follow the last one follows from that. A causal convolution has all
of it before, which torch writes as a pad and a convolution, or as a longer convolution and a slice: values of other lengths,
that no number of ranks would divide. These ops exist until a program is made local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten

_LIBRARIES: Any = torch.library  # not typed
_LIBRARY = _LIBRARIES.Library("autoshard", "FRAGMENT")
_SETTINGS = "int[] stride, int[] padding, int[] dilation, int groups"
_LIBRARY.define(f"aligned_convolution(Tensor input, Tensor weight, {_SETTINGS}) -> Tensor")
_LIBRARY.define(f"aligned_convolution_input(Tensor grad_output, Tensor weight, {_SETTINGS}) -> Tensor")
_LIBRARY.define(f"aligned_convolution_weight(Tensor grad_output, Tensor input, Tensor weight, {_SETTINGS}) -> Tensor")

Lengths = Sequence[int]


def _convolution(input: Tensor, weight: Tensor, stride: Lengths, padding: Lengths, dilation: Lengths, groups: int) -> Tensor:
    longer = _padded(input, weight, stride, padding, dilation)
    result: Tensor = aten.convolution(longer, weight, None, stride, _none(stride), dilation, False, _none(stride), groups)
    return result


def _of_input(grad: Tensor, weight: Tensor, stride: Lengths, padding: Lengths, dilation: Lengths, groups: int) -> Tensor:
    after = _after(weight, stride, padding, dilation)
    kernels = [(size - 1) * step for size, step in zip(weight.shape[2:], dilation, strict=True)]
    left = [a + b + c - d - 1 for a, b, c, d in zip(stride, padding, after, kernels, strict=True)]
    result: Tensor = aten.convolution(grad, weight, None, stride, _none(stride), dilation, True, left, groups)
    for dim, (start, step) in enumerate(zip(padding, stride, strict=True), 2):
        result = result.narrow(dim, start, grad.shape[dim] * step)
    return result.contiguous()


def _of_weight(
    grad: Tensor, input: Tensor, weight: Tensor, stride: Lengths, padding: Lengths, dilation: Lengths, groups: int
) -> Tensor:
    longer = _padded(input, weight, stride, padding, dilation)
    settings = (stride, _none(stride), dilation, False, _none(stride), groups)
    result: Tensor = aten.convolution_backward(grad, longer, weight, None, *settings, [False, True, False])[1]
    return result


def _padded(input: Tensor, weight: Tensor, stride: Lengths, padding: Lengths, dilation: Lengths) -> Tensor:
    pads = zip(padding, _after(weight, stride, padding, dilation), strict=True)
    return F.pad(input, [length for pair in reversed(list(pads)) for length in pair])


def _after(weight: Tensor, stride: Lengths, padding: Lengths, dilation: Lengths) -> list[int]:
    settings = zip(weight.shape[2:], stride, padding, dilation, strict=True)
    return [max(0, (size - 1) * step - before - (wide - 1)) for size, wide, before, step in settings]


def _none(stride: Lengths) -> list[int]:
    return [0] * len(stride)


for _key in ("CPU", "CUDA", "Meta"):
    _LIBRARY.impl("aligned_convolution", _convolution, _key)
    _LIBRARY.impl("aligned_convolution_input", _of_input, _key)
    _LIBRARY.impl("aligned_convolution_weight", _of_weight, _key)

ALIGNED_CONVOLUTION = torch.ops.autoshard.aligned_convolution.default
ALIGNED_CONVOLUTION_INPUT = torch.ops.autoshard.aligned_convolution_input.default
ALIGNED_CONVOLUTION_WEIGHT = torch.ops.autoshard.aligned_convolution_weight.default
