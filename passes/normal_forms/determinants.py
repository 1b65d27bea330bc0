"""Rewrites of determinants to a factorization and products, whose values do not depend on strides.

PyTorch's kernels factorize the transpose of a contiguous matrix, and the backward that was captured relies on it. A rank
may hold the same matrix with other strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int

aten = torch.ops.aten
iota = torch.ops.prims.iota.default


def _factorized(at: At) -> tuple[Node, Node, Node]:
    """Return the factors, the pivots, and the diagonal, of the matrices that the kernel would factorize."""
    matrices = tensor_of(at.operand)
    given = at.operand
    if matrices.is_contiguous() and not matrices.is_complex():
        order = list(range(matrices.dim()))
        given = at.call(aten.permute.default, given, [*order[:-2], order[-1], order[-2]])
    both = at.call(aten.linalg_lu_factor_ex.default, given)
    factors, pivots = (at.call(operator.getitem, both, i) for i in range(2))
    return factors, pivots, at.call(aten.diagonal.default, factors, 0, -2, -1)


def _sign_of(at: At, pivots: Node, dtype: torch.dtype) -> Node:
    """Return the sign of a permutation, from the row that each row was exchanged with, counted from 1."""
    held = tensor_of(pivots)
    kwargs = {"start": 1, "step": 1, "dtype": held.dtype, "device": held.device, "requires_grad": False}
    moved = at.call(aten.ne.Tensor, pivots, at.call(iota, held.shape[-1], **kwargs))
    odd = at.call(aten.remainder.Scalar, at.call(aten.sum.dim_IntList, moved, [-1], False), 2)
    sign = at.call(aten.add.Tensor, at.call(aten.mul.Tensor, odd, -2), 1)
    return at.call(torch.ops.prims.convert_element_type.default, sign, dtype)


def _determinant(at: At) -> bool:
    factors, pivots, diagonal = _factorized(at)
    product = at.call(aten.prod.dim_int, diagonal, -1)
    result = at.call(aten.mul.Tensor, product, _sign_of(at, pivots, tensor_of(product).dtype))
    return _give(at, result, factors, pivots)


def _logarithm(at: At) -> bool:
    factors, pivots, diagonal = _factorized(at)
    signs = at.call(aten.prod.dim_int, at.call(aten.sgn.default, diagonal), -1)
    sign = at.call(aten.mul.Tensor, signs, _sign_of(at, pivots, tensor_of(signs).dtype))
    logs = at.call(aten.log.default, at.call(aten.abs.default, diagonal))
    return _give(at, sign, at.call(aten.sum.dim_IntList, logs, [-1], False), factors, pivots)


def _give(at: At, *results: Node) -> bool:
    for user in list(at.node.users):
        at.at(user).replace(results[as_int(user.args[1])])
    at.graph.erase_node(at.node)
    return True


REWRITES: dict[Any, Callable[[At], bool]] = {
    aten._linalg_det.default: _determinant,
    aten._linalg_slogdet.default: _logarithm,
}
