"""Rewrites that drop calls without effect, and merge chains of views or permutes into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from passes.ir.fake_calls import is_viewable
from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int, is_returned

aten = torch.ops.aten
prims = torch.ops.prims


# --- 1: calls without effect


def _identity(at: At) -> bool:
    return at.replace(at.operand)


def _convert(at: At) -> bool:
    return tensor_of(at.operand).dtype == tensor_of(at.node).dtype and _identity(at)


def _clone(at: At) -> bool:
    same = tensor_of(at.operand).stride() == tensor_of(at.node).stride()
    return same and not is_returned(at.node) and _identity(at)


def _slice(at: At) -> bool:
    return tensor_of(at.operand).shape == tensor_of(at.node).shape and _identity(at)


# --- 2: one view, one permutation


def _view(at: At) -> bool:
    source = at.operand
    while source.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        source = at.at(source).operand
    shape = list(tensor_of(at.node).shape)
    if list(tensor_of(source).shape) == shape:
        return at.replace(source)
    if source is at.operand and at.node.target is aten.view.default and at.node.args[1] == shape:
        return False
    if not is_viewable(tensor_of(source), shape):
        source = at.call(aten.clone.default, source, memory_format=torch.contiguous_format)
    return at.replace(at.call(aten.view.default, source, shape))


def _permute(at: At) -> bool:
    source, dims = at.operand, _permutation(at.node)
    chained = False
    while source.target in _PERMUTES:
        inner = _permutation(source)
        dims = [inner[d] for d in dims]
        source, chained = at.at(source).operand, True
    if dims == list(range(len(dims))):
        return at.replace(source)
    if not chained and at.node.target is aten.permute.default:
        return False
    return at.replace(at.call(aten.permute.default, source, dims))


_PERMUTES = (aten.permute.default, aten.t.default, aten.transpose.int)


def _permutation(node: Node) -> list[int]:
    """Return the order of dims that a `permute`, `t` or `transpose` gives."""
    ndim = tensor_of(node).dim()
    dims = list(range(ndim))
    if node.target is aten.permute.default:
        given = node.args[1]
        assert isinstance(given, tuple | list)
        return [int(str(d)) % ndim for d in given]
    a, b = (0, ndim - 1) if node.target is aten.t.default else (as_int(node.args[1]) % ndim, as_int(node.args[2]) % ndim)
    dims[a], dims[b] = dims[b], dims[a]
    return dims


REWRITES: dict[Any, Callable[[At], bool]] = {
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.lift_fresh_copy.default: _identity,
    aten.clone.default: _clone,
    prims.convert_element_type.default: _convert,
    aten._to_copy.default: _convert,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.permute.default: _permute,
    aten.t.default: _permute,
    aten.transpose.int: _permute,
}
