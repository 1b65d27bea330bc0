"""Changes of Python objects that a call of the model makes: `self.last = y`, `self.steps += 1`, `self.log.append(y)`.

A graph computes tensors only. The new values of attributes and items are results of the graph beside the model's output,
and each call of the program stores them in the objects of the model, as the call of the model would.

A number that a call adds to, and a list that it appends to, have another value at each call. While they are traced, a
stand-in is in their place that can be added to and appended to, and nothing else: a model that reads it fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.capture.held_objects import Path, format_path, held_objects, reach
from autoshard.capture.object_contents import Step, dict_of
from passes._torch import SideEffect, TreeSpec, flatten_pytree, unflatten_pytree

LISTS = (list, deque)


class Added:
    """Stands for a number of which only the sum with other numbers is taken."""

    def __init__(self, amount: Any) -> None:
        self.amount = amount

    def __add__(self, other: Any) -> Added:
        return Added(self.amount + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Added:
        return Added(self.amount - other)

    def __bool__(self) -> bool:
        raise TypeError("a number that the model changes is read")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a number that the model changes is read")

    __hash__ = None  # type: ignore[assignment]


class Appended:
    """Stands for a list, or deque, to which items are appended, and of which nothing else is asked.

    Once it is emptied, what it held is of no interest: an empty one like it takes its place, which is read as any other.
    """

    def __init__(self, empty: Callable[[], Any], places: Sequence[tuple[Any, str]]) -> None:
        self.items: list[Any] = []
        self.empty, self.places = empty, tuple(places)

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def clear(self) -> None:
        emptied = self.empty()
        for owner, name in self.places:
            setattr(owner, name, emptied)
        del self.items  # one that is still held elsewhere may not be used

    def __delitem__(self, part: Any) -> None:
        _check_whole(part)
        self.clear()

    def __setitem__(self, part: Any, items: Any) -> None:
        _check_whole(part)
        self.clear()
        owner, name = self.places[0]
        getattr(owner, name).extend(items)

    def __bool__(self) -> bool:
        raise TypeError("a list that the model changes is read")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a list that the model changes is read")

    __hash__ = None  # type: ignore[assignment]


def _check_whole(part: Any) -> None:
    if not isinstance(part, slice) or (part.start, part.stop, part.step) != (None, None, None):
        raise TypeError("a list that the model changes is read")


@dataclass(frozen=True)
class Change:
    """Values that a call stores in one object: in the attributes `names`, or (without names) as all items.

    `read` are the attributes that the call reads before it sets them; `added` those to which it adds a number or items, or
    whose items it replaces. One that `is_alias` holds a list of another change.
    """

    path: Path
    names: tuple[str, ...]
    read: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    is_alias: bool = False

    def values(self, model: Any) -> Any:
        """Return the values that the object has now. A call of this is traced."""
        held = reach(model, self.path)
        if self.is_alias:
            return {}
        if self.names:
            return {name: _plain(getattr(held, name), is_added=name in self.added) for name in self.names}
        return dict(held) if isinstance(held, dict) else list(held)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of the values: "metric.total"; that of the object, if it is a list or dict."""
        if not self.names:
            return (format_path(self.path),)
        return tuple(format_path((*self.path, Step(name))) for name in self.names)

    @property
    def added_paths(self) -> tuple[tuple[str, str], ...]:
        """Return the names of what the call adds to, and their paths."""
        return tuple((name, format_path((*self.path, Step(name)))) for name in sorted(self.added))

    @property
    def paths_read(self) -> tuple[str, ...]:
        """Return the paths of values that the call depends on."""
        if not self.names:
            return self.paths
        return tuple(format_path((*self.path, Step(name))) for name in self.names if name in self.read - self.added)

    def last_values(self, model: nn.Module, stored: Any) -> Any:
        """Return the values that the object has now: of a list that was appended to, as many as are `stored`."""
        values = self.values(model)
        for name in self.added & values.keys():
            if isinstance(stored[name], list):
                values[name] = list(values[name])[len(values[name]) - len(stored[name]) :]
        return values

    def store(self, model: nn.Module, values: Any) -> None:
        """Store new values, as a call of the model would."""
        held = reach(model, self.path)
        if not self.names:
            held.clear()
            held.update(values) if isinstance(held, dict) else held.extend(values)
            return
        for name in () if self.is_alias else self.names:
            new, before = values[name], getattr(held, name) if name in self.added else None
            if isinstance(before, LISTS):
                if isinstance(new, tuple):
                    before.clear()
                before.extend(new)
            else:
                setattr(held, name, new if before is None else before + new)


def _plain(value: Any, *, is_added: bool) -> Any:
    """Return the value to store: a number, or items in a list, which are added to it, or in a tuple, which replace its own."""
    if isinstance(value, Added):
        return value.amount
    if isinstance(value, Appended):
        return list(value.items)
    return tuple(value) if is_added and isinstance(value, LISTS) else value


@dataclass(frozen=True)
class NewValues:
    """The changes of a call, and where their values are among the graph's outputs, as in `Signature.results`."""

    changes: tuple[Change, ...] = ()
    names: tuple[str, ...] = ()  # of the outputs that are stored: "self.metric.total"
    results: tuple[tuple[int | None, Any], ...] = ()
    spec: TreeSpec | None = None

    def store(self, model: nn.Module, outputs: Sequence[Any]) -> None:
        """Store the new values that a call computed in the objects of `model`."""
        if self.spec is None:
            return
        leaves = [value if number is None else outputs[number] for number, value in self.results]
        for change, values in zip(self.changes, unflatten_pytree(leaves, self.spec), strict=True):
            change.store(model, values)

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that a call of `model` itself has stored, by name."""
        if self.spec is None:
            return {}
        stored = unflatten_pytree(list(self.results), self.spec)
        found = [change.last_values(model, new) for change, new in zip(self.changes, stored, strict=True)]
        leaves = ((name_of_new(self.changes, path), leaf) for path, leaf in flatten_pytree(found)[0])
        return {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}


NOTHING_NEW = NewValues()


def name_of_new(changes: Sequence[Change], path: str) -> str:
    """Return the name of a value among those of `changes`, which is at `path`: `0.total` is "self.metric.total"."""
    number, _, inside = path.partition(".")
    whole = format_path(changes[int(number)].path)
    return ".".join(part for part in ("self", whole, inside) if part)


@dataclass(frozen=True)
class Traced:
    """The changes to trace in a model: the objects whose values are returned, and the modules that assign buffers, with
    the names of these.
    """

    changes: tuple[Change, ...]
    buffers: tuple[tuple[Path, tuple[str, ...]], ...]


def changes_of(model: nn.Module, effects: Sequence[SideEffect]) -> Traced | SideEffect:
    """Return the changes that `effects` are; an effect that is none, if there is one.

    Numbers and lists that the call adds to are replaced by stand-ins in `model`, a copy that is only traced.
    """
    objects = list(held_objects(model))
    paths = {id(value): path for path, value in objects}
    buffers = {id(value._buffers): path for path, value in objects if isinstance(value, nn.Module)}
    changes, assigning = [], []
    for effect in effects:
        number = id(effect.changed)
        if number in buffers:
            assigning.append((buffers[number], effect.keys))
        elif number not in paths or (effect.names and dict_of(effect.changed) is None):
            return effect
        elif effect.names:
            changes.append(Change(paths[number], effect.names, effect.read, _numbers(effect)))
        elif isinstance(effect.changed, (*LISTS, dict)):
            changes += _items_of(effect, paths[number], objects)
        elif not isinstance(effect.changed, nn.Module):
            return effect
    return Traced(tuple(changes), tuple(assigning))


def stand_in(model: nn.Module, traced: Traced) -> None:
    """Put stand-ins in the place of what is added to."""
    lists: dict[int, list[tuple[Any, str]]] = {}
    for change in traced.changes:
        held = reach(model, change.path)
        for name in change.added:
            value = getattr(held, name)
            if isinstance(value, LISTS):
                lists.setdefault(id(value), []).append((held, name))
            else:
                setattr(held, name, Added(0))
    for places in lists.values():
        owner, name = places[0]
        value = getattr(owner, name)
        other = Appended(partial(deque, maxlen=value.maxlen) if isinstance(value, deque) else list, places)
        for owner, name in places:
            setattr(owner, name, other)


def _items_of(effect: SideEffect, path: Path, objects: Sequence[tuple[Path, Any]]) -> list[Change]:
    """Return the changes of a list or dict: of a list that is an attribute, only the items that are appended."""
    last = path[-1]
    if not isinstance(effect.changed, LISTS) or last.is_item:
        return [Change(path, ())]
    places = [(path[:-1], last.key)]
    for holder, value in objects:
        places += [(holder, name) for name, one in (dict_of(value) or {}).items() if one is effect.changed]
    first, *others = dict.fromkeys(places)
    added = frozenset({last.key})
    return [
        Change(first[0], (first[1],), added, added),
        *(Change(holder, (name,), frozenset({name}), frozenset({name}), is_alias=True) for holder, name in others),
    ]


def _numbers(effect: SideEffect) -> frozenset[str]:
    """Return the attributes that are numbers before and after a call that reads them."""
    return frozenset(
        name
        for name in effect.read
        if _is_number(getattr(effect.changed, name, None)) and _is_number(effect.constants.get(name))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
