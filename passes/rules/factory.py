"""Sharding rules of factories (`full`, `arange`, `eye`): each rank makes its part.

Constants are made in the per-device shape; `arange` and `eye` are computed from global positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from passes.ir.call import Call
from passes.ir.graph import tensor_of
from passes.rules.factors import Factors
from passes.rules.rule import Linear, LocalCall, Space, register, remade

aten = torch.ops.aten
prims = torch.ops.prims

ZEROS = (Linear((), ("sum",)),)  # zeros may be partial: a sum of zeros is zero
FILLED = {
    aten.zeros.default: 0,
    aten.ones.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
}


def _value(call: Call) -> Any:
    """Return the value of every element, None if it is undefined."""
    named = {parameter.name for parameter in call.op._schema.arguments}
    return call.arg("fill_value") if "fill_value" in named else FILLED.get(call.op)


def _filled(call: Call) -> Space:
    """Return the space of a filled tensor. Only dtype and device of an operand (`new_full`) are read: its dims are
    separate."""
    factors = Factors()
    operands = [factors.dims(operand.shape, blocked=range(operand.ndim), prefix="like") for operand in call.operands]
    return factors.space(operands, [factors.dims(call.result.shape)], linear=ZEROS if _value(call) == 0 else ())


def _filled_like(call: Call) -> Space:
    factors = Factors()
    dims = factors.dims(call.result.shape)
    return factors.space([dims], [dims], linear=ZEROS if _value(call) == 0 else ())


def _local_filled(call: LocalCall) -> Node:
    return remade(call, size=list(call.local_shape()))


def _local_strided(call: LocalCall) -> Node:
    """Make an undefined tensor contiguous, as its strides carry no meaning."""
    shape = call.local_shape()
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return remade(call, size=list(shape), stride=strides)


def _scalar(call: Call) -> Space:
    return Factors().space([], [()], linear=ZEROS if call.arg("s") == 0 else ())


def _positions(call: Call) -> Space:
    """Return the space of a result that is computed from positions, without operands."""
    factors = Factors()
    dims = factors.dims(call.result.shape)
    return factors.space([], [dims], numbered=frozenset(factor for dim in dims for factor in dim))


def _is_whole(call: LocalCall) -> bool:
    return not any(call.result_layout().axes_on(dim) for dim in range(call.call.result.ndim))


def _local_count(call: LocalCall) -> Node:
    """Compute `start + step * position` if the dim is sharded."""
    if _is_whole(call):
        return remade(call)
    named = {parameter.name for parameter in call.call.op._schema.arguments}
    start = call.call.arg("start") if "start" in named else 0
    step = call.call.arg("step") if "step" in named else 1
    result = call.call.result
    count = call.positions(call.result_layout(), 0, result.shape[0])
    if result.dtype.is_floating_point:
        count = _converted(call, count, torch.float64)
    else:
        start, step = int(start), int(step)
    if step != 1:
        count = call.emit(aten.mul.Tensor, count, step)
    if start != 0:
        count = call.emit(aten.add.Tensor, count, start)
    return _converted(call, count, result.dtype)


def _local_eye(call: LocalCall) -> Node:
    """Set 1 where the global positions of row and column are equal."""
    if _is_whole(call):
        return remade(call)
    result, layout = call.call.result, call.result_layout()
    row = call.emit(aten.unsqueeze.default, call.positions(layout, 0, result.shape[0]), 1)
    column = call.emit(aten.unsqueeze.default, call.positions(layout, 1, result.shape[1]), 0)
    return _converted(call, call.emit(aten.eq.Tensor, row, column), result.dtype)


def _converted(call: LocalCall, node: Node, dtype: torch.dtype) -> Node:
    if tensor_of(node).dtype == dtype:
        return node
    return call.emit(prims.convert_element_type.default, node, dtype)


register(
    aten.empty.memory_format,
    aten.full.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.zeros.default,
    space=_filled,
    local=_local_filled,
)
register(aten.empty_strided.default, aten.new_empty_strided.default, space=_filled, local=_local_strided)
register(
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    space=_filled_like,
)
register(aten.scalar_tensor.default, space=_scalar)
register(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    prims.iota.default,
    space=_positions,
    local=_local_count,
)
register(aten.eye.default, aten.eye.m, space=_positions, local=_local_eye)
