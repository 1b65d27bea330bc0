"""Notice changes of what captured code reads from outside of the model: globals, attributes of classes, variables of
enclosing functions, the functions that it calls, and whether there is what it looks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import attrgetter, is_, is_not, itemgetter
from types import ModuleType
from typing import Any

import torch

from autoshard.capture.signature import is_constant
from autoshard.runtime.calls.descriptions import MISSING, Description, Entry, Missing, Same, of_constant
from passes._torch import OUTSIDE_GONE, Keys, OutsideRead, followed

_SETS = (set, frozenset)
_SIZED = (list, tuple, dict, deque, *_SETS)


@dataclass(frozen=True)
class _Items:
    """The items of a set, told by their number: their order is another on each rank."""

    items: frozenset[Any]

    def __repr__(self) -> str:
        return f"a set of {len(self.items)}"


class OutsideValues:
    """The values that the code of captured calls reads from outside of the model, as they were last."""

    def __init__(self) -> None:
        self.reads: dict[str, OutsideRead] = {}
        self._getters: list[Callable[[], Any]] = []
        self._values: list[Any] = []
        self._described: list[Any] = []
        self._sized: list[int] = []  # numbers of containers: they may change in place

    def add(self, reads: Iterable[OutsideRead]) -> Description:
        """Add what a captured call reads, and return the values that were not read before."""
        known, new = {(id(read.root), read.steps) for read in self.reads.values()}, []
        for read in reads:
            if (id(read.root), read.steps) not in known:
                name = f"global {read.name}"
                while name in self.reads:  # of another class of that name, say
                    name += "'"
                self.reads[name] = read
                new.append(name)
        described = self.describe()
        return {name: described[name] for name in new}

    def describe(self) -> Description:
        """Return the values that all have now."""
        self._getters = [_getter(read) for read in self.reads.values()]
        self._values = [_value(read) for read in self.reads.values()]
        self._described = [_described(value) for value in self._values]
        self._sized = [number for number, value in enumerate(self._values) if isinstance(value, _SIZED)]
        return {name: Entry(value) for name, value in zip(self.reads, self._described, strict=True)}

    def are_unchanged(self) -> bool:
        """Return whether each is what it was."""
        try:
            now = [get() for get in self._getters]
        except OUTSIDE_GONE:
            return False
        numbers: Iterable[int] = self._sized
        if not all(map(is_, now, self._values)):
            numbers = {*numbers, *(number for number, moved in enumerate(map(is_not, now, self._values)) if moved)}
        if any(_described(now[number]) != self._described[number] for number in numbers):
            return False
        self._values = now
        return True


def _getter(read: OutsideRead) -> Callable[[], Any]:
    """Return a function that reads a value, and does little else."""
    keys = [str(key) for _, key in takewhile(lambda one: one[0] is getattr, read.steps)]
    space, rest = getattr(read.root, "__dict__", {}), read.steps[len(keys) :]
    if keys == ["__dict__"] and len(rest) == 1:
        return partial(rest[0][0], space, rest[0][1])
    if not keys:
        return read.value
    is_held = len(keys) == 1 and keys[0] in space
    first = partial(itemgetter(keys[0]), space) if is_held else partial(attrgetter(".".join(keys)), read.root)
    return (lambda: followed(first(), rest)) if rest else first


def _value(read: OutsideRead) -> Any:
    try:
        return read.value()
    except OUTSIDE_GONE:
        return MISSING.value


def _described(value: Any) -> Any:
    """Describe a value: what is read of a list, dict or object is among the values itself."""
    if isinstance(value, Missing):
        return value
    if isinstance(value, Keys):
        return Keys(tuple(Same(key) if isinstance(key, torch.Tensor) else key for key in value.keys))
    if isinstance(value, _SIZED):
        return type(value), _Items(frozenset(value)) if isinstance(value, _SETS) else len(value)
    if is_constant(value):
        return of_constant(value)
    return Same(value) if callable(value) or isinstance(value, torch.Tensor | ModuleType) else Same(type(value))
