"""Rewrites of reductions to sums and products, which may be partial on an axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int

aten = torch.ops.aten


# --- 3: a product, then its bias


def _addmm(at: At) -> bool:
    if at.node.kwargs:  # alpha or beta
        return False
    bias, left, right = at.node.args
    product = at.call(aten.mm.default, left, right)
    return at.replace(at.call(aten.add.Tensor, product, bias))


def _convolution(at: At) -> bool:
    value, weight, bias, *others = at.node.args
    if bias is None:
        return False
    result = at.call(aten.convolution.default, value, weight, None, *others)
    return at.replace(at.call(aten.add.Tensor, result, at.call(aten.view.default, bias, _along_channels(result))))


def _along_channels(value: Node) -> list[int]:
    return [tensor_of(value).shape[1], *(1 for _ in tensor_of(value).shape[2:])]


def _convolution_backward(at: At) -> bool:
    """Sum the gradient of the bias apart from the others."""
    *others, mask = at.node.args
    assert isinstance(mask, list | tuple)
    asked = [bool(mask[0]), bool(mask[1]), False]
    if not mask[2] or any(user.target is not operator.getitem for user in at.node.users):
        return False
    others[3] = None
    both = at.call(aten.convolution_backward.default, *others, asked) if any(asked) else None
    for user in list(at.node.users):
        place, number = at.at(user), as_int(user.args[1])
        if number == 2:
            place.replace(place.call(aten.sum.dim_IntList, at.operand, [0, *range(2, tensor_of(at.operand).dim())]))
        elif both is not None:
            place.replace(place.call(operator.getitem, both, number))
    at.graph.erase_node(at.node)
    return True


# --- 4: a sum, then a division by the global count


def _mean(at: At) -> bool:
    operand = tensor_of(at.operand)
    dims = at.arg(1, "dim", None) if at.node.target is aten.mean.dim else None
    dims = [d % operand.dim() for d in dims] if dims else list(range(operand.dim()))
    kwargs = {"dtype": at.node.kwargs["dtype"]} if at.node.kwargs.get("dtype") is not None else {}
    total = at.call(aten.sum.dim_IntList, at.operand, dims, at.arg(2, "keepdim", False), **kwargs)
    return at.replace(at.call(aten.div.Tensor, total, math.prod(operand.shape[d] for d in dims)))


# --- 6: batch statistics are sums


def _var_mean(at: At) -> bool:
    operand = tensor_of(at.operand)
    dims = at.arg(1, "dim", None)
    dims = sorted(d % operand.dim() for d in dims) if dims else list(range(operand.dim()))
    if 0 not in dims or any(user.target is not operator.getitem for user in at.node.users):
        return False
    keepdim = bool(at.node.kwargs.get("keepdim", False))
    correction = at.node.kwargs.get("correction")
    count = math.prod(operand.shape[d] for d in dims)
    mean = at.call(aten.div.Tensor, at.call(aten.sum.dim_IntList, at.operand, dims, True), count)
    centred = at.call(aten.sub.Tensor, at.operand, mean)
    squares = at.call(aten.sum.dim_IntList, at.call(aten.mul.Tensor, centred, centred), dims, keepdim)
    var = at.call(aten.div.Tensor, squares, count - (1 if correction is None else correction))
    if not keepdim:
        mean = at.call(aten.view.default, mean, list(tensor_of(var).shape))
    for user in list(at.node.users):
        at.at(user).replace((var, mean)[as_int(user.args[1])])
    at.graph.erase_node(at.node)
    return True


# --- 7: a sum of rows that have one nonzero entry each


def _sum(at: At) -> bool:
    """Turn `sum(scatter(0, dim, index, value) * factor, dim)` into `value * factor`."""
    rows, dims = at.operand, at.node.args[1]
    if rows.target is not aten.mul.Tensor or len(rows.all_input_nodes) != 2 or not at.arg(2, "keepdim", False):
        return False
    for one_hot, factor in (rows.all_input_nodes, rows.all_input_nodes[::-1]):
        if one_hot.target is not aten.scatter.value:
            continue
        base, dim, index, value = one_hot.args
        assert isinstance(base, Node) and isinstance(index, Node)
        is_zero = base.target is aten.full.default and base.args[1] == 0
        alike = all(tensor_of(node).shape == tensor_of(at.node).shape for node in (index, factor))
        same_dtype = tensor_of(factor).dtype == tensor_of(at.node).dtype
        if is_zero and alike and same_dtype and dims == [as_int(dim) % tensor_of(rows).dim()]:
            return at.replace(at.call(aten.mul.Tensor, factor, value))
    return False


REWRITES: dict[Any, Callable[[At], bool]] = {
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.var_mean.correction: _var_mean,
    aten.sum.dim_IntList: _sum,
}
