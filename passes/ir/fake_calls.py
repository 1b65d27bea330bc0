"""Fake values of calls, computed once for each form of operands.

Equal layers, and the candidates of a search, repeat the same calls, and running one on fake tensors takes longer than
everything else that a pass does with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from passes._torch import FakeTensorMode, OpOverload, fake_empty, fake_view, shares_memory, without_autocast
from passes.ir.graph import value_of, values_in

KNOWN = 1 << 16  # cached forms of calls; a model has some hundreds


@dataclass(frozen=True)
class _Form:
    """All of a tensor but its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool  # of the first operand

    @staticmethod
    def of(value: torch.Tensor, *, is_view: bool) -> _Form:
        return _Form(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.device, is_view)


_known: dict[Any, _Form] = {}


def fake_call(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a call on fake tensors; `args` and `kwargs` hold nodes, which have values."""
    key = _key(target, args, kwargs)
    if key is None:
        return _run(mode, target, args, kwargs)
    if key not in _known and target.is_view:
        _remember(key, _viewed(target, args, kwargs))
    if key in _known:
        return _made(mode, _known[key], args)
    value = _run(mode, target, args, kwargs)
    is_view = target.is_view and shares_memory(value, value_of(_first(args)))
    if is_view and value.dtype is not value_of(_first(args)).dtype:
        return value
    _remember(key, _Form.of(value, is_view=is_view))
    return value


def _viewed(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Form | None:
    """Return the result of a view, computed without the fake mode because it is the same on every device; None for
    other ops."""
    given = value_of(_first(args))
    memory = torch.empty(given.untyped_storage().nbytes() // given.itemsize, dtype=given.dtype, device="meta")
    base = memory.as_strided(given.shape, given.stride(), given.storage_offset())
    try:
        value = target(base, *values_in(args[1:]), **values_in(kwargs))
    except RuntimeError:  # strides forbid it: let the fake mode say so
        return None
    if value.dtype is not given.dtype or not shares_memory(value, memory):
        return None
    return replace(_Form.of(value, is_view=True), device=given.device)


def _remember(key: Any, form: _Form | None) -> None:
    if len(_known) == KNOWN:
        _known.clear()
    if form is not None:
        _known[key] = form


def is_viewable(value: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether the strides of `value` allow a view of that shape."""
    return _strides_allow(value.shape, value.stride(), tuple(shape))


@lru_cache(maxsize=KNOWN)
def _strides_allow(shape: torch.Size, stride: tuple[int, ...], new: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(shape, stride, device="meta").view(new)
    except (RuntimeError, ValueError):
        return False
    return True


def _run(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode, without_autocast():
        return target(*values_in(args), **values_in(kwargs))


def _made(mode: FakeTensorMode, form: _Form, args: Sequence[Any]) -> torch.Tensor:
    if form.is_view:
        return fake_view(mode, value_of(_first(args)), form.shape, form.stride, form.offset)
    return fake_empty(mode, form.shape, form.dtype, form.device, form.stride)


def _first(args: Sequence[Any]) -> Node:
    assert isinstance(args[0], Node)
    return args[0]


def _key(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the call with operands by form; None unless it gives one tensor, new or a view of its operand."""
    if not isinstance(target, OpOverload) or len(target._schema.returns) != 1:
        return None
    result = target._schema.returns[0]
    is_new = result.alias_info is None
    if str(result.type) != "Tensor" or not (is_new or (target.is_view and args and isinstance(args[0], Node))):
        return None
    return target, torch.get_default_dtype(), described(args, placed=not is_new), described(kwargs, placed=not is_new)


def described(value: Any, *, placed: bool = True) -> Any:
    """Return arguments as a key that is equal for calls of one form.

    It holds all of an operand but its memory and, unless `placed`, its storage offset.
    """
    if isinstance(value, Node):
        held = value_of(value)
        if isinstance(held, torch.Tensor):
            return held.shape, held.stride(), held.storage_offset() if placed else 0, held.dtype, held.device
        return type(held), held
    if isinstance(value, tuple | list):
        return tuple([described(item, placed=placed) for item in value])
    if isinstance(value, dict):
        return tuple([(name, described(item, placed=placed)) for name, item in value.items()])
    return type(value), value
