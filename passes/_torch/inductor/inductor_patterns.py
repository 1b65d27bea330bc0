"""A filter for Inductor's patterns that skips those that cannot match, as it spends most of its time on attention
patterns.

A pattern is a tree of calls; it cannot match a graph that lacks one of them. This is checked when the pattern's turn
comes, as earlier replacements may have added calls: first for the call that was missing before. Patterns that pad
matrix products are for GPUs only, and skipped for graphs on CPU.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch._inductor.fx_passes.pad_mm import should_pad_addmm, should_pad_bmm, should_pad_mm
from torch._inductor.pattern_matcher import (
    CallFunction,
    MultiOutputPattern,
    PatternEntry,
    PatternExpr,
    PatternMatcherPass,
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
    return _apply(asked, gm)


class _Possible(dict[Any, Any]):
    """The matcher's entries by operation and target, without those that cannot match."""

    def __init__(self, patterns: dict[Any, list[PatternEntry]], graph: Graph) -> None:
        super().__init__(patterns)
        self._table = graph._find_nodes_lookup_table.table
        self._is_padded = _is_on_gpu(graph)
        self._missing: dict[PatternExpr, tuple[tuple[str, Any], ...]] = {}  # a call that the graph lacked at the last check

    def __getitem__(self, key: Any) -> Iterator[PatternEntry]:
        entries = (entry for entry in super().__getitem__(key) if self._is_padded or not _is_padding(entry.extra_check))
        return (entry for entry in entries if self._is_possible(entry.pattern))

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
