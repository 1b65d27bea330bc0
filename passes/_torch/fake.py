"""Fake tensors, which have shapes and shared memory but no data."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.compiler import _compile_session_context
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from passes._torch.patches import replaced

_NEW = FakeTensor.__new__
_CACHED = functools._lru_cache_wrapper


def fake_mode() -> Any:
    """Return a context manager in which tensors have static shapes and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Let torch not log the traceback of an op that fails on tensors without data: it raises the error, too."""
    log = logging.getLogger(FakeTensor.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def as_traced() -> Iterator[None]:
    """Let code run in a fake mode as while it is traced: `is_compiling()` is true, and no cache keeps what it computes."""
    made: list[weakref.ref[FakeTensor]] = []

    def noted(*args: Any, **kwargs: Any) -> FakeTensor:
        new: FakeTensor = _NEW(*args, **kwargs)
        made.append(weakref.ref(new))
        return new

    try:
        with _compile_session_context(), replaced(FakeTensor, "__new__", noted):
            yield
    finally:
        if any(tensor() is not None for tensor in made):
            clear_caches()


def clear_caches() -> None:
    """Clear each `functools.lru_cache` that holds a fake tensor, which later calls would get; all objects are looked through."""
    for function in gc.get_referrers(_CACHED):
        if type(function) is _CACHED and function.cache_info().currsize and any(map(_has_fakes, gc.get_referents(function))):
            function.cache_clear()


def _has_fakes(value: object, depth: int = 4) -> bool:
    """Return whether a value is a fake tensor, or holds one in containers of so many levels."""
    if isinstance(value, dict | tuple | list) and depth:
        return any(_has_fakes(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))
    return is_fake(value)


@contextmanager
def rehearsed(mode: FakeTensorMode) -> Iterator[None]:
    """Let code run on fake tensors as while it is traced: `is_compiling()` is true, and `item()` gives an unknown
    number.
    """
    before = mode.shape_env, mode.allow_scalar_outputs
    mode.shape_env, mode.allow_scalar_outputs = ShapeEnv(), True
    try:
        with mode, torch.no_grad(), as_traced():
            yield
    finally:
        mode.shape_env, mode.allow_scalar_outputs = before


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """Return the fake mode of fake tensors, a new one if there are none."""
    return detect_fake_mode(list(values)) or FakeTensorMode(allow_non_fake_inputs=True)


def fake_empty(
    mode: FakeTensorMode,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a fake tensor, contiguous without `stride`, without the cost of a dispatched call."""
    if stride is None:
        return FakeTensor(mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), device)
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def fake_view(
    mode: FakeTensorMode, base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a fake tensor on the memory of fake tensor `base`, without the cost of a dispatched call."""
    with in_kernel_invocation_manager(mode):
        view = base.as_strided(shape, stride, offset)
    return FakeTensor(mode, view, base.device)


def memory_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor, fake or not, from that of others while both are there."""
    found: int = tensor.untyped_storage()._cdata
    return found


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return memory_of(one) == memory_of(other)


def is_known(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes holds whatever they turn out to be, by what is known of them."""
    return bool(statically_known_true(condition))
