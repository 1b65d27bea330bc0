"""Tell what programs store in a model's objects from what its user changes in them.

A value that a program stores is no change of the model, as long as no captured code depends on what it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.capture.changes import Change
from autoshard.capture.held_objects import reach


@dataclass(frozen=True)
class Holder:
    """An object in which programs store values: `names` are the attributes, or keys, of those to which nothing is bound."""

    inside: Any  # the dict of its attributes, or the list or dict itself
    ignored: frozenset[str]
    stored: frozenset[str]

    def look(self, described: Callable[[Any], Any]) -> Any:
        """Return what a change of the object by its user would change: values that are not stored are compared by identity.
        """
        if not self.stored:
            return described(self.inside)
        kept = [(name, id(value)) for name, value in self.inside.items() if name not in self.stored]
        return kept, [(name, described(self.inside.get(name))) for name in sorted(self.stored - self.ignored)]


@dataclass(frozen=True)
class _Call:
    """A captured call: the names that it reads, and its changes."""

    names: frozenset[str] | None
    changes: tuple[Change, ...]

    def reads(self, path: str) -> bool:
        """Return whether the call depends on the value at `path` before it."""
        if any(path in change.paths for change in self.changes):
            return any(path in change.paths_read for change in self.changes)
        return self.names is None or path.rpartition(".")[2] in self.names


@dataclass(frozen=True)
class StoredValues:
    """The values that the programs of a model store."""

    calls: tuple[_Call, ...] = ()

    def with_call(self, names: frozenset[str] | None, changes: tuple[Change, ...]) -> StoredValues:
        """Return these and those of another program."""
        return StoredValues((*self.calls, _Call(names, changes)))

    def is_ignored(self, path: str) -> bool:
        """Return whether a program stores the value at `path`, or the list or object that holds it, and none depends on
        it.
        """
        parts = path.split(".")
        wholes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        stored = [one for one in wholes if any(one in change.paths for change in self.changes)]
        return any(not any(call.reads(one) for call in self.calls) for one in stored)

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return the changes of all programs."""
        return tuple(change for call in self.calls for change in call.changes)

    def holders(self, model: nn.Module) -> tuple[Holder, ...]:
        """Return the objects of `model` in which values are stored."""
        found: dict[int, Holder] = {}
        for change in self.changes:
            held = _held(model, change)
            inside = vars(held) if change.names and held is not None else held
            if inside is None:
                continue
            before = found.get(id(inside), Holder(inside, frozenset(), frozenset()))
            names = frozenset(change.names)
            ignored = frozenset(n for n, path in zip(change.names, change.paths, strict=False) if self.is_ignored(path))
            found[id(inside)] = Holder(inside, before.ignored | ignored, before.stored | names)
        return tuple(found.values())


def _held(model: nn.Module, change: Change) -> Any:
    """Return the object of a change; None if the model does not have it any more."""
    try:
        return reach(model, change.path)
    except (AttributeError, LookupError, TypeError):
        return None
