"""Changes of Python objects that a call of the model makes: `self.last = y`, `self.steps += 1`, `self.log.append(y)`.

A graph computes tensors only. The new values of attributes and items are results of the graph beside the model's output,
and each call of the program stores them in the objects of the model, as the call of the model would.

A number that a call adds to, and a list that it appends to, have another value at each call. While they are traced, a
stand-in is in their place that can be added to and appended to, and nothing else: a model that reads it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.held_objects import Path, format_path, held_objects, reach
from autoshard.capture.object_contents import Step, dict_of
from passes._torch import SideEffect, TreeSpec, flatten_pytree, unflatten_pytree


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
    """Stands for a list to which items are appended, and of which nothing else is asked."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __bool__(self) -> bool:
        raise TypeError("a list that the model changes is read")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a list that the model changes is read")

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Change:
    """Values that a call stores in one object: in the attributes `names`, or (without names) as all items.

    `read` are the attributes that the call reads before it sets them; `added` those to which it adds a number or items.
    """

    path: Path
    names: tuple[str, ...]
    read: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()

    def values(self, model: Any) -> Any:
        """Return the values that the object has now. A call of this is traced."""
        held = reach(model, self.path)
        if self.names:
            return {name: _plain(getattr(held, name)) for name in self.names}
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
        for name in self.added:
            if isinstance(values[name], list):
                values[name] = values[name][-len(stored[name]) :]
        return values

    def store(self, model: nn.Module, values: Any) -> None:
        """Store new values, as a call of the model would."""
        held = reach(model, self.path)
        if not self.names:
            held.clear()
            held.update(values) if isinstance(held, dict) else held.extend(values)
            return
        for name in self.names:
            new = values[name]
            if name in self.added:
                before = getattr(held, name)
                new = [*before, *new] if isinstance(before, list) else before + new
                if isinstance(before, list):
                    before[:] = new
                    continue
            setattr(held, name, new)


def _plain(value: Any) -> Any:
    if isinstance(value, Added):
        return value.amount
    return list(value.items) if isinstance(value, Appended) else value


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
        elif isinstance(effect.changed, list | dict):
            changes.append(_items_of(effect, paths[number], model))
        elif not isinstance(effect.changed, nn.Module):
            return effect
    return Traced(tuple(changes), tuple(assigning))


def stand_in(model: nn.Module, traced: Traced) -> None:
    """Put stand-ins in the place of what is added to."""
    for change in traced.changes:
        held = reach(model, change.path)
        for name in change.added:
            setattr(held, name, Appended() if isinstance(getattr(held, name), list) else Added(0))


def _items_of(effect: SideEffect, path: Path, model: nn.Module) -> Change:
    """Return the change of a list or dict: of a list that is an attribute, only the items that are appended."""
    last = path[-1]
    if not isinstance(effect.changed, list) or last.is_item:
        return Change(path, ())
    return Change(path[:-1], (last.key,), frozenset({last.key}), frozenset({last.key}))


def _numbers(effect: SideEffect) -> frozenset[str]:
    """Return the attributes that are numbers before and after a call that reads them."""
    return frozenset(
        name
        for name in effect.read
        if _is_number(getattr(effect.changed, name, None)) and _is_number(effect.constants.get(name))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
