"""Describe values so that they can be compared later, and say how two descriptions differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoshard.capture.signature import format_tensor, identity_of
from passes.errors import with_article


@dataclass(frozen=True, eq=False)
class Same:
    """A value that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return with_article(type(self.value).__name__)


@dataclass(frozen=True)
class Tied:
    """A tensor that was met before, at another path."""

    path: str

    def __repr__(self) -> str:
        return f"tied to {self.path}"


class Missing:
    """Stand for the value at a path where there is none."""


@dataclass(frozen=True)
class Entry:
    """A value that capture may read, and the attributes that lead to it, beginning at its module; none: always read."""

    value: Any
    names: tuple[str, ...] = ()

    def is_read(self, names: frozenset[str] | None) -> bool:
        """Return whether code that reads `names` may read this value (None: any)."""
        return names is None or names.issuperset(self.names)


Description = dict[str, Entry]
MISSING = Entry(Missing())


def of_constant(value: Any) -> tuple[type, Any]:
    """Describe a constant by its type and value."""
    return type(value), identity_of(value)


def format_changes(found: dict[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Return what differs, by path: "dropout.p: 0.1 -> 0.5". Of an object that is new or gone, what it holds is left out."""
    whole = tuple(f"{path}." for path, ends in found.items() if any(isinstance(one, Missing) for one in ends))
    return tuple(_format_change(path, *ends) for path, ends in found.items() if not path.startswith(whole))


def _format_change(path: str, old: Any, new: Any) -> str:
    if isinstance(old, Missing):
        return f"{path} is new"
    if isinstance(new, Missing):
        return f"{path} is gone"
    before, after = _format(old), _format(new)
    return f"{path} is another: {after}" if before == after else f"{path}: {before} -> {after}"


def _format(value: Any) -> str:
    match value:
        case (type(), given):
            return given if isinstance(given, str) and value[0] is not str else repr(given)
        case (str(), torch.Size() as shape, torch.dtype() as dtype, _, requires_grad, _):
            return format_tensor(shape, dtype) + (", trained" if requires_grad else ", frozen")
        case (Same(one), *others) if others:
            return with_article(type(one).__name__)
        case tuple():
            return f"{len(value)} hooks"
        case _:
            return repr(value)
