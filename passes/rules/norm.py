"""Sharding rules of fused normalizations: the dims that are normalized over stay whole, the rest may be sharded.

Gradients of weight and bias are sums over the other dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from passes.ir.call import Call, Tensor
from passes.ir.graph import tensor_of
from passes.rules.factors import Dim, Factors
from passes.rules.rule import Linear, LocalCall, Space, register

aten = torch.ops.aten


# Layer norm and RMS norm: over the last dims


def _layer_norm(call: Call) -> Space:
    """Return the space of layer norm, which gives `(out, mean, rstd)`, or of RMS norm, which gives `(out, rstd)`."""
    factors, whole, statistics, normalized = _trailing(call)
    affine = [normalized for _ in call.operands[1:]]
    return factors.space([whole, *affine], [whole, *(statistics for _ in call.results[1:])])


def _layer_norm_backward(call: Call) -> Space:
    """Return the space of a backward, which gives those of `(grad_input, grad_weight, grad_bias)` that are
    requested."""
    factors, whole, statistics, normalized = _trailing(call)
    saved = [statistics for name in ("mean", "rstd") if _has(call, name)]
    affine = [normalized for _ in call.operands[2 + len(saved) :]]
    results = [
        dims for dims, asked in zip((whole, normalized, normalized), call.arg("output_mask"), strict=False) if asked
    ]
    return factors.space([whole, whole, *saved, *affine], results, linear=(Linear((0,)),))


def _trailing(call: Call) -> tuple[Factors, list[Dim], list[Dim], list[Dim]]:
    """Return the factors, and the dims of the input, of its statistics and of the last dims, which are normalized
    over."""
    shape = call.arg("input").shape
    first = len(shape) - len(call.arg("normalized_shape"))
    factors = Factors()
    whole = factors.dims(shape, blocked=range(first, len(shape)))
    return factors, whole, [*whole[:first], *([()] * (len(shape) - first))], whole[first:]


def _layer_norm_backward_local(call: LocalCall) -> Node:
    args = list(call.args)
    for place, parameter in enumerate(call.call.op._schema.arguments):
        if parameter.name in ("mean", "rstd"):
            args[place] = _contiguous(call, args[place])
    return call.emit(call.call.op, *args)


def _contiguous(call: LocalCall, value: Node) -> Node:
    """Copy a slice into contiguous memory.

    Backward kernels read statistics as one block, whatever their strides (torch 2.13, CPU: wrong gradients without an
    error); group norm rejects inputs with gaps.
    """
    if tensor_of(value).is_contiguous():
        return value
    return call.emit(aten.clone.default, value, memory_format=torch.contiguous_format)


def _has(call: Call, name: str) -> bool:
    return any(parameter.name == name for parameter in call.op._schema.arguments)


register(aten.native_layer_norm.default, aten._fused_rms_norm.default, space=_layer_norm)
register(
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm_backward.default,
    space=_layer_norm_backward,
    local=_layer_norm_backward_local,
)


# Group norm: over positions and the channels of a group


def _group_norm(call: Call) -> Space:
    factors, whole, statistics, channels = _grouped(call)
    affine = [channels for _ in call.operands[1:]]
    return factors.space([whole, *affine], [whole, statistics, statistics])


def _group_norm_backward(call: Call) -> Space:
    factors, whole, statistics, channels = _grouped(call)
    weight = [channels for _ in call.operands[4:]]
    results = [dims for dims, asked in zip((whole, channels, channels), call.arg("output_mask"), strict=True) if asked]
    return factors.space([whole, whole, statistics, statistics, *weight], results, linear=(Linear((0,)),))


def _grouped(call: Call) -> tuple[Factors, list[Dim], list[Dim], list[Dim]]:
    """Return the factors, and the dims of the input `[N, C, ...]`, of its statistics `[N, groups]` and of its
    channels."""
    shape, groups = call.arg("input").shape, call.arg("group")
    factors = Factors()
    batch, group = factors.one("n", shape[0]), factors.one("g", groups)
    channels = (*group, *factors.one("c", shape[1] // groups, blocked=True))
    positions = [factors.one(f"p{dim}", size, blocked=True) for dim, size in enumerate(shape[2:])]
    return factors, [batch, channels, *positions], [batch, group], [channels]


def _group_norm_local(call: LocalCall) -> Node:
    """Pass the sizes of this rank's part, which are arguments of the op."""
    value, weight, bias = call.args[:3]
    sizes = _sizes(value, call.call.args[4] // call.call.args[6])
    return call.emit(call.call.op, _contiguous(call, value), weight, bias, *sizes, call.args[7])


def _group_norm_backward_local(call: LocalCall) -> Node:
    grad, value, mean, rstd, weight = call.args[:5]
    sizes = _sizes(value, call.call.args[6] // call.call.args[8])
    dense = (_contiguous(call, each) for each in (grad, value, mean, rstd))
    return call.emit(call.call.op, *dense, weight, *sizes, call.args[9])


def _sizes(value: Node, group_size: int) -> tuple[int, int, int, int]:
    """Return batch, channels, positions and groups of a per-device value."""
    shape = tensor_of(value).shape
    return shape[0], shape[1], math.prod(shape[2:]), shape[1] // group_size


register(aten.native_group_norm.default, space=_group_norm, local=_group_norm_local)
register(aten.native_group_norm_backward.default, space=_group_norm_backward, local=_group_norm_backward_local)


# Batch norm: over everything but channels, in training; by the running statistics otherwise


def _batch_norm(call: Call) -> Space:
    """Return the space of batch norm, which gives `(out, save_mean, save_invstd)` and perhaps new running
    statistics."""
    factors, whole, channels = _channeled(call, training=_is_training(call))
    operands = [whole, *(channels for _ in call.operands[1:])]
    results = [whole, *(_saved(factors, tensor, channels) for tensor in call.results[1:])]
    # Statistics that every rank has in full: empty ones, and in evaluation the given ones, which are returned.
    every = range(1, len(results))
    equal = [i for i in every if not (call.results[i].shape[0] and _is_training(call))]
    return factors.space(operands, results, replicated_results=frozenset(equal))


def _batch_norm_backward(call: Call) -> Space:
    factors, whole, channels = _channeled(call, training=call.arg("train"))
    operands = [whole, whole, *(_saved(factors, tensor, channels) for tensor in call.operands[2:])]
    results = [dims for dims, asked in zip((whole, channels, channels), call.arg("output_mask"), strict=True) if asked]
    return factors.space(operands, results, linear=(Linear((0,)),))


def _channeled(call: Call, *, training: bool) -> tuple[Factors, list[Dim], list[Dim]]:
    shape: Sequence[int] = call.arg("input").shape
    factors = Factors()
    whole = factors.dims(shape, blocked=[dim for dim in range(len(shape)) if dim != 1] if training else ())
    return factors, whole, [whole[1]]


def _is_training(call: Call) -> bool:
    return _has(call, "training") and bool(call.arg("training"))


def _saved(factors: Factors, tensor: Tensor, channels: list[Dim]) -> list[Dim]:
    """Return the dims of statistics, which are per channel or empty."""
    return channels if tensor.shape[0] else factors.dims(tensor.shape, prefix="empty")


register(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    space=_batch_norm,
)
register(aten.native_batch_norm_backward.default, space=_batch_norm_backward)


# Weight norm: over all dims of a weight but one


def _weight_norm_backward(call: Call) -> Space:
    """Return the space of the gradients of direction and length: the dim that has a length per element may be sharded."""
    shape, kept = call.operands[0].shape, call.arg("dim")
    factors = Factors()
    whole = factors.dims(shape, blocked=[dim for dim in range(len(shape)) if dim != kept])
    length = [factor if dim == kept else () for dim, factor in enumerate(whole)]
    return factors.space([whole, whole, length, length], [whole, length], linear=(Linear((0,)),))


def _weight_norm_backward_local(call: LocalCall) -> Node:
    return call.emit(call.call.op, *(_contiguous(call, value) for value in call.args[:4]), call.args[4])


register(
    aten._weight_norm_interface_backward.default,
    space=_weight_norm_backward,
    local=_weight_norm_backward_local,
)
