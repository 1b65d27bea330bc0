"""Sharding rules of `pad_end` and `cut_end`.

The dim itself may be sharded, where the part that a rank stores of the shorter one, with zeros at its end, is its part of
the longer one. Then neither op changes anything on a device.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from passes.ir.call import Call
from passes.ir.graph import tensor_of
from passes.ir.padding import CUT_END, PAD_END
from passes.rules.factors import Factors
from passes.rules.rule import LocalCall, Space, register
from passes.rules.view import MOVES

aten = torch.ops.aten


def _space(call: Call) -> Space:
    """Return a space in which both forms of the dim share a factor of the longer one's size."""
    short, long = sorted((call.operands[0].shape, call.result.shape))
    dim = call.arg("dim")
    factors = Factors()
    dims = factors.dims(long)
    factors.hold(f"d{dim}", short[dim])
    return factors.space([dims], [dims], linear=MOVES)


def _local_pad(call: LocalCall) -> Node:
    value, dim, size = call.args
    if call.result_layout().axes_on(dim):
        return call.operands[0]
    shape = tensor_of(call.operands[0]).shape
    missing = [0, 0] * (len(shape) - dim - 1) + [0, size - shape[dim]]
    return call.emit(aten.constant_pad_nd.default, value, missing, 0)


def _local_cut(call: LocalCall) -> Node:
    value, dim, size = call.args
    if call.result_layout().axes_on(dim):
        return call.operands[0]
    return call.emit(aten.slice.Tensor, value, dim, 0, size)


register(PAD_END, space=_space, local=_local_pad)
register(CUT_END, space=_space, local=_local_cut)
