"""Inductor's patterns, without those that cannot be in a graph: most of its time it looks for attention written out.

A pattern is a tree of calls; where the graph has no call of what one of them is, the pattern is nowhere in it. The graph is
asked when a pattern's turn comes, as those found before may have added calls: first for the call that was missing before.
Products are padded on a GPU alone: without one each would be looked at for nothing.
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
    """Let Inductor try those patterns alone whose calls are all in the graph."""
    return replaced(PatternMatcherPass, "apply", _apply_possible)


def _apply_possible(matcher: PatternMatcherPass, gm: GraphModule | Graph) -> int:
    graph = gm.graph if isinstance(gm, GraphModule) else gm
    asked: Any = copy.copy(matcher)
    asked.patterns = _Possible(matcher.patterns, graph)
    return _apply(asked, gm)


class _Possible(dict[Any, Any]):
    """Entries by operation and target, as the matcher reads them."""

    def __init__(self, patterns: dict[Any, list[PatternEntry]], graph: Graph) -> None:
        super().__init__(patterns)
        self._table = graph._find_nodes_lookup_table.table
        self._is_padded = _is_on_gpu(graph)
        self._missing: dict[PatternExpr, tuple[tuple[str, Any], ...]] = {}  # a call that was not there when last asked

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
    """Return whether any input is."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return any(isinstance(value, torch.Tensor) and value.device.type in ("cuda", "xpu") for value in values)


@cache
def _is_padding(check: Callable[..., Any]) -> bool:
    """Return whether an entry's check asks, after its own, whether a product is worth padding."""
    return inspect.isfunction(check) and inspect.getclosurevars(check).nonlocals.get("extra_check") in _PADDING


@cache
def _called(pattern: PatternExpr) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Return the keys that each call in a pattern may have in a graph's table of nodes; parts that may match anything, or be
    missing, are of no call."""
    return tuple(dict.fromkeys(_calls(pattern)))


def _calls(pattern: Any) -> Iterator[tuple[tuple[str, Any], ...]]:
    if isinstance(pattern, MultiOutputPattern | tuple | list):
        for part in pattern.outputs if isinstance(pattern, MultiOutputPattern) else pattern:
            yield from _calls(part)
    elif isinstance(pattern, CallFunction):
        yield tuple((pattern.op, target) for target in pattern.fns)
        yield from _calls((*pattern.args, *pattern.kwargs.values()))
