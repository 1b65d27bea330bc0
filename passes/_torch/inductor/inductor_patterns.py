"""A filter for Inductor's patterns that skips those that cannot match, as it spends most of its time on attention
patterns.

A pattern is a tree of calls; it cannot match a graph that lacks one of them. Patterns wait for such a call, all that lack
the same together, as replacements may add it. Of the others, most fail at what makes an operand of a node, which is asked first.
Patterns that pad matrix products are for GPUs only, and skipped for graphs on CPU.

Patterns that torch has traced ahead leave out all sizes and dims: they match `softmax(dim=-2)` as they match
`softmax(dim=-1)`. So each match is checked with the pattern traced anew for the shapes of the graph, as torch checks
those of all other patterns; where they do not fit the pattern, it does not match.
"""

from __future__ import annotations

import bisect
import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch._inductor.fx_passes.pad_mm import should_pad_addmm, should_pad_bmm, should_pad_mm
from torch._inductor.pattern_matcher import (
    CallFunction,
    FailedMatch,
    Match,
    MultiOutputPattern,
    PatternEntry,
    PatternExpr,
    PatternMatcherPass,
    ReplacementPatternEntry,
)
from torch.fx import Graph, GraphModule, Node

from passes._torch.patches import replaced

_apply = PatternMatcherPass.apply
_Keys = tuple[tuple[str, Any], ...]  # of a call in a pattern: its possible keys in a graph's table of nodes
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
        self._met: dict[Any, _Entries] = {}

    def __getitem__(self, key: Any) -> Iterator[PatternEntry]:
        if key not in self._met:
            entries = (entry for entry in super().__getitem__(key) if self._is_padded or not _is_padding(entry.extra_check))
            self._met[key] = _Entries(tuple(entries), self._table)
        return self._met[key].possible()


class _Entries:
    """The entries for one kind of node: those that a graph had all calls of, and those that wait for a call."""

    def __init__(self, entries: tuple[PatternEntry, ...], table: Mapping[Any, Any]) -> None:
        self._entries, self._table = tuple(map(_exact, entries)), table
        self._calls = [_called(entry.pattern) for entry in entries]
        self._ready: list[int] = []  # numbers of entries, in order
        self._waiting: dict[_Keys, list[int]] = {}
        for number in range(len(entries)):
            self._sort_in(number)

    def possible(self) -> Iterator[PatternEntry]:
        """Yield the entries that can match, in order; calls that an entry before them added to the graph count."""
        place = 0
        while True:
            for keys in [keys for keys in self._waiting if self._is_there(keys)]:
                for number in self._waiting.pop(keys):
                    self._sort_in(number)
            at = bisect.bisect_left(self._ready, place)
            if at == len(self._ready):
                return
            yield self._entries[self._ready[at]]
            place = self._ready[at] + 1

    def _sort_in(self, number: int) -> None:
        """Put an entry with those that are ready, or with those that wait for the same call."""
        lacking = next((keys for keys in self._calls[number] if not self._is_there(keys)), None)
        if lacking is None:
            bisect.insort(self._ready, number)
        else:
            self._waiting.setdefault(lacking, []).append(number)

    def _is_there(self, keys: _Keys) -> bool:
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
    """Return an entry whose check does not use the pattern that was traced ahead, and that fails fast."""
    if not isinstance(entry, ReplacementPatternEntry):
        return entry
    exact = copy.copy(entry)
    if isinstance(entry.pattern, CallFunction):
        vars(exact)["pattern"] = _Operands(entry.pattern)
    exact.extra_check = _without_traced_ahead(entry.extra_check)
    return exact


class _Operands:
    """A pattern of a call that fails, before torch compares the whole tree, where another call makes one of the operands."""

    def __init__(self, pattern: CallFunction) -> None:
        self._pattern = pattern
        self._makers = [(at, tuple(one.fns)) for at, one in enumerate(pattern.args) if isinstance(one, CallFunction)]

    def match(self, node: Node) -> Match | FailedMatch:
        args = node.args
        for at, targets in self._makers:
            if at >= len(args) or getattr(args[at], "target", None) not in targets:
                return FailedMatch("operand {} of {}", at, node)
        return self._pattern.match(node)


@cache
def _without_traced_ahead(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's check with None for its variable `search_fn_pattern`: it traces the pattern then."""
    if not isinstance(check, FunctionType) or "search_fn_pattern" not in check.__code__.co_freevars:
        return check
    named = zip(check.__code__.co_freevars, check.__closure__ or (), strict=True)
    cells = tuple(CellType(None) if name == "search_fn_pattern" else cell for name, cell in named)
    return FunctionType(check.__code__, check.__globals__, check.__name__, check.__defaults__, cells)


@cache
def _called(pattern: PatternExpr) -> tuple[_Keys, ...]:
    """Return, for each call in a pattern, its possible keys in a graph's table of nodes.

    Parts of the pattern that may match anything, or may be missing, are left out.
    """
    return tuple(dict.fromkeys(_calls(pattern)))


def _calls(pattern: Any) -> Iterator[_Keys]:
    if isinstance(pattern, MultiOutputPattern | tuple | list):
        for part in pattern.outputs if isinstance(pattern, MultiOutputPattern) else pattern:
            yield from _calls(part)
    elif isinstance(pattern, CallFunction):
        yield tuple((pattern.op, target) for target in pattern.fns)
        yield from _calls((*pattern.args, *pattern.kwargs.values()))
