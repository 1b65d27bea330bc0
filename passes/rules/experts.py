"""Sharding rules of products per expert: rows sorted by expert, each multiplied by the matrix of its expert.

`ends` holds, for each expert, the end of its rows. If rows are sharded, a rank counts those ends among its own rows.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from passes.ir.call import Call
from passes.ir.graph import tensor_of
from passes.rules.local_forms.masked import unchanged
from passes.rules.rule import Dims, Linear, LocalCall, Space, register_named

aten = torch.ops.aten
prims = torch.ops.prims

_ENDS = 2  # position of `ends` among the arguments
_ROWS, _MATRICES, _PRODUCTS = (("m",), ("k",)), (("e",), ("k",), ("n",)), (("m",), ("n",))


def _product(call: Call) -> Space | None:
    """Return the space of (rows [m, k], matrices [e, k, n], ends [e]) -> [m, n]."""
    return _space(call, (_ROWS, _MATRICES, (("e",),)), (_PRODUCTS,), (Linear((0,)), Linear((1,))))


def _product_backward(call: Call) -> Space | None:
    """Return the space of (rows, matrices, ends, gradient [m, n]) -> gradients of rows and matrices."""
    return _space(call, (_ROWS, _MATRICES, (("e",),), _PRODUCTS), (_ROWS, _MATRICES), (Linear((3,)),))


def _space(call: Call, operands: tuple[Dims, ...], results: tuple[Dims, ...], linear: tuple[Linear, ...]) -> Space | None:
    given = call.operands
    if tuple(tensor.ndim for tensor in given) != tuple(map(len, operands)):
        return None
    sizes = {"m": given[0].shape[0], "e": given[1].shape[0], "k": given[1].shape[1], "n": given[1].shape[2]}
    return Space(sizes, operands, results, blocked=frozenset("e"), linear=linear)


def _local(call: LocalCall) -> Node:
    layout = call.operand_layout(0)
    if not layout.axes_on(0):
        return unchanged(call)
    ends = call.operands[_ENDS]
    rows = call.positions(layout, 0, call.call.operands[0].shape[0])
    before = call.emit(aten.lt.Tensor, call.emit(aten.unsqueeze.default, rows, -1), ends)
    count = call.emit(aten.sum.dim_IntList, before, [0])
    own = call.emit(prims.convert_element_type.default, count, tensor_of(ends).dtype)
    return call.emit(call.call.op, *call.args[:_ENDS], own, *call.args[_ENDS + 1 :], **call.kwargs)


# Ops of transformers, which defines them when it is imported.
register_named("transformers.grouped_mm_fallback.default", space=_product, local=_local)
register_named("transformers.grouped_mm_fallback_backward.default", space=_product_backward, local=_local)
