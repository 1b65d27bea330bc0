"""Rewrites of reversals: two of them are none, and a cumulative sum between two is one from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from passes._torch import REVERSED_CUMSUM
from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int, is_returned

aten = torch.ops.aten
prims = torch.ops.prims

_REVERSALS = (prims.rev.default, aten.flip.default)


# --- 12: reversals


def _reversed(at: At) -> bool:
    sums = at.operand
    if sums.target in _REVERSALS and _dims(sums) == _dims(at.node) and not is_returned(at.node):
        return at.replace(At(at.graph, sums, at.fake_mode).operand)
    if sums.target is not aten.cumsum.default or sums.kwargs or not tensor_of(sums).dim():
        return False
    turned, dim = sums.args
    assert isinstance(turned, Node)
    dim = as_int(dim) % tensor_of(sums).dim()
    if turned.target not in _REVERSALS or not _dims(turned) == _dims(at.node) == [dim]:
        return False
    value = turned.args[0]
    assert isinstance(value, Node)
    if tensor_of(value).dtype != tensor_of(sums).dtype:
        return False
    return at.replace(at.call(REVERSED_CUMSUM, value, dim))


def _dims(node: Node) -> list[int]:
    dims = node.args[1]
    assert isinstance(dims, list | tuple)
    return [as_int(dim) % tensor_of(node).dim() for dim in dims]


REWRITES: dict[Any, Callable[[At], bool]] = dict.fromkeys(_REVERSALS, _reversed)
