"""Rewrite `as_strided` of a dense tensor to the view, slices and permutation that it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int

aten = torch.ops.aten


# --- 2: views by strides


@dataclass(frozen=True)
class _Window:
    """A slice of one dim of the memory, seen as a tensor of `sizes`: its start and length."""

    start: int
    length: int


def _as_strided(at: At) -> bool:
    """Rewrite a view whose strides divide each other: each is a digit of the position in memory."""
    base, made = tensor_of(at.operand), tensor_of(at.node)
    offset = at.arg(3, "storage_offset", None)
    offset = 0 if offset is None else as_int(offset) - int(base.storage_offset())
    dims = [dim for dim, size in enumerate(made.shape) if size > 1 and made.stride(dim) > 0]
    dims.sort(key=made.stride, reverse=True)
    rest = [] if dims and made.stride(dims[-1]) == 1 else [1]  # one element of the innermost digit
    strides = [base.numel(), *(made.stride(dim) for dim in dims), *rest]
    if not base.is_contiguous() or not base.numel() or any(large % small for large, small in pairwise(strides)):
        return False
    sizes = [large // small for large, small in pairwise(strides)]
    lengths = [*(made.shape[dim] for dim in dims), *rest]
    windows = [
        _Window(offset // small % size, length) for small, size, length in zip(strides[1:], sizes, lengths, strict=True)
    ]
    if not 0 <= offset < base.numel() or any(w.start + w.length > size for w, size in zip(windows, sizes, strict=True)):
        return False
    value = _sliced(at, _viewed(at, at.operand, sizes), windows)
    order = sorted(range(len(dims)), key=dims.__getitem__)
    if order != sorted(order):
        value = at.call(aten.permute.default, value, [*order, *(len(dims) for _ in rest)])
    flat = [size if made.stride(dim) > 0 else 1 for dim, size in enumerate(made.shape)]
    value = _viewed(at, value, flat)
    if flat != list(made.shape):
        value = at.call(aten.expand.default, value, list(made.shape))
    return at.replace(value)


def _viewed(at: At, value: Node, shape: list[int]) -> Node:
    have = list(tensor_of(value).shape)
    assert math.prod(have) == math.prod(shape)
    return value if have == shape else at.call(aten.view.default, value, shape)


def _sliced(at: At, value: Node, windows: list[_Window]) -> Node:
    for dim, window in enumerate(windows):
        if window.length < tensor_of(value).shape[dim]:
            value = at.call(aten.slice.Tensor, value, dim, window.start, window.start + window.length)
    return value


REWRITES: dict[Any, Callable[[At], bool]] = {aten.as_strided.default: _as_strided}
