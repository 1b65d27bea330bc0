"""Inductor's patterns, without those that cannot be in a graph: most of its time it looks for attention written out.

A pattern is a tree of calls; where the graph has no call of what one of them is, the pattern is nowhere in it. The graph is
asked when a pattern's turn comes, as those found before may have added calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest import mock

from torch._inductor.pattern_matcher import (
    CallFunction,
    MultiOutputPattern,
    PatternEntry,
    PatternExpr,
    PatternMatcherPass,
)
from torch.fx import Graph, GraphModule

_apply = PatternMatcherPass.apply


def possible_patterns() -> AbstractContextManager[Any]:
    """Let Inductor try those patterns alone whose calls are all in the graph."""
    return mock.patch.object(PatternMatcherPass, "apply", _apply_possible)


def _apply_possible(matcher: PatternMatcherPass, gm: GraphModule | Graph) -> int:
    graph = gm.graph if isinstance(gm, GraphModule) else gm
    with mock.patch.object(matcher, "patterns", _Possible(matcher.patterns, graph)):
        return _apply(matcher, gm)


class _Possible(dict[Any, Any]):
    """Entries by operation and target, as the matcher reads them."""

    def __init__(self, patterns: dict[Any, list[PatternEntry]], graph: Graph) -> None:
        super().__init__(patterns)
        self._table = graph._find_nodes_lookup_table.table

    def __getitem__(self, key: Any) -> Iterator[PatternEntry]:
        return (entry for entry in super().__getitem__(key) if self._is_possible(entry.pattern))

    def _is_possible(self, pattern: PatternExpr) -> bool:
        table = self._table
        return all([any(table.get(key) for key in keys) for keys in _called(pattern)])


@cache
def _called(pattern: PatternExpr) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Of each call in a pattern, the keys that it may have in a graph's table of nodes; parts that may match anything, or be
    missing, are of no call."""
    return tuple(dict.fromkeys(_calls(pattern)))


def _calls(pattern: Any) -> Iterator[tuple[tuple[str, Any], ...]]:
    if isinstance(pattern, MultiOutputPattern | tuple | list):
        for part in pattern.outputs if isinstance(pattern, MultiOutputPattern) else pattern:
            yield from _calls(part)
    elif isinstance(pattern, CallFunction):
        yield tuple((pattern.op, target) for target in pattern.fns)
        yield from _calls((*pattern.args, *pattern.kwargs.values()))
