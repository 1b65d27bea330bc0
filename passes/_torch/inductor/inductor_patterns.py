"""A filter for Inductor's patterns that skips those that cannot match, as it spends most of its time on attention
patterns.

A pattern is a tree of calls; it cannot match a graph that lacks one of them. This is checked when the pattern's turn
comes, as earlier replacements may have added calls: first for the call that was missing before. Patterns that pad
matrix products are for GPUs only, and skipped for graphs on CPU.

Patterns that torch has traced ahead leave out all sizes and dims: they match `softmax(dim=-2)` as they match
`softmax(dim=-1)`. So each match is checked with the pattern traced anew for the shapes of the graph, as torch checks
those of all other patterns; where they do not fit the pattern, it does not match.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch._inductor.fx_passes.pad_mm import should_pad_addmm, should_pad_bmm, should_pad_mm
from torch._inductor.pattern_matcher import (
    CallFunction,
    MultiOutputPattern,
    PatternEntry,
    PatternExpr,
    PatternMatcherPass,
    ReplacementPatternEntry,
)
from torch.fx import Graph, GraphModule

from passes._torch.patches import replaced

_apply = PatternMatcherPass.apply
_PADDING = (should_pad_mm, should_pad_bmm, should_pad_addmm)


def possible_patterns() -> AbstractContextManager[Any]:
    """Let Inductor try only those patterns whose calls are all in the graph."""
    return replaced(PatternMatcherPass, "apply", _apply_possible)


def _apply_possible(matcher: PatternMatcherPass, gm: GraphModule | Graph) -> int:
    graph = gm.graph if isinstance(gm, GraphModule) else gm
    asked: Any = copy.copy(matcher)
    asked.patterns = _Possible(matcher.patterns, graph)
    with _no_log_of_failed_traces():
        return _apply(asked, gm)


@contextmanager
def _no_log_of_failed_traces() -> Iterator[None]:
    """Leave out what fake tensors log, with a traceback, where a pattern cannot be traced for the shapes of a match.

    Torch takes this for no match, which `torch._inductor.pattern_matcher` logs.
    """
    thread, log = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


class _Possible(dict[Any, Any]):
    """The matcher's entries by operation and target, without those that cannot match."""

    def __init__(self, patterns: dict[Any, list[PatternEntry]], graph: Graph) -> None:
        super().__init__(patterns)
        self._table = graph._find_nodes_lookup_table.table
        self._is_padded = _is_on_gpu(graph)
        self._missing: dict[PatternExpr, tuple[tuple[str, Any], ...]] = {}  # a call that the graph lacked at the last check

    def __getitem__(self, key: Any) -> Iterator[PatternEntry]:
        entries = (entry for entry in super().__getitem__(key) if self._is_padded or not _is_padding(entry.extra_check))
        return (_exact(entry) for entry in entries if self._is_possible(entry.pattern))

    def _is_possible(self, pattern: PatternExpr) -> bool:
        known = self._missing.get(pattern)
        if known is not None and not self._is_there(known):
            return False
        for keys in _called(pattern):
            if not self._is_there(keys):
                self._missing[pattern] = keys
                return False
        return True

    def _is_there(self, keys: tuple[tuple[str, Any], ...]) -> bool:
        return any(map(self._table.get, keys))


def _is_on_gpu(graph: Graph) -> bool:
    """Return whether any input is on a GPU."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return any(isinstance(value, torch.Tensor) and value.device.type in ("cuda", "xpu") for value in values)


@cache
def _is_padding(check: Callable[..., Any]) -> bool:
    """Return whether an entry's check asks, after its own test, whether padding a product pays off."""
    return inspect.isfunction(check) and inspect.getclosurevars(check).nonlocals.get("extra_check") in _PADDING


def _exact(entry: PatternEntry) -> PatternEntry:
    """Return an entry whose check does not use the pattern that was traced ahead."""
    if not isinstance(entry, ReplacementPatternEntry):
        return entry
    exact = copy.copy(entry)
    exact.extra_check = _without_traced_ahead(entry.extra_check)
    return exact


@cache
def _without_traced_ahead(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's check with None for its variable `search_fn_pattern`: it traces the pattern then."""
    if not isinstance(check, FunctionType) or "search_fn_pattern" not in check.__code__.co_freevars:
        return check
    named = zip(check.__code__.co_freevars, check.__closure__ or (), strict=True)
    cells = tuple(CellType(None) if name == "search_fn_pattern" else cell for name, cell in named)
    return FunctionType(check.__code__, check.__globals__, check.__name__, check.__defaults__, cells)


@cache
def _called(pattern: PatternExpr) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Return, for each call in a pattern, its possible keys in a graph's table of nodes.

    Parts of the pattern that may match anything, or may be missing, are left out.
    """
    return tuple(dict.fromkeys(_calls(pattern)))


def _calls(pattern: Any) -> Iterator[tuple[tuple[str, Any], ...]]:
    if isinstance(pattern, MultiOutputPattern | tuple | list):
        for part in pattern.outputs if isinstance(pattern, MultiOutputPattern) else pattern:
            yield from _calls(part)
    elif isinstance(pattern, CallFunction):
        yield tuple((pattern.op, target) for target in pattern.fns)
        yield from _calls((*pattern.args, *pattern.kwargs.values()))
