"""Walk over the Python objects that a model's modules hold in their attributes: lists, dicts, and plain objects."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DEPTH_MAX = 4  # attributes of attributes that are looked at: `self.config.rope.theta` has 3
ITEMS_MAX = 1000  # items of a container that are looked at; a larger one is data
INTERNAL = (frozenset(nn.Module().__dict__) | {"_autoshard"}) - {"training"}  # attributes that every module has


@dataclass(frozen=True)
class Step:
    """One step from an object to another that it holds: an attribute, or an item of a list or dict."""

    key: Any
    is_item: bool = False


Path = tuple[Step, ...]


def reach(holder: Any, path: Path) -> Any:
    """Return the object to which `path` leads. A call of this is also traced."""
    for step in path:
        holder = holder[step.key] if step.is_item else getattr(holder, step.key)
    return holder


def format_path(path: Path) -> str:
    """Return "metric.total", "log.0"."""
    return ".".join(str(step.key) for step in path)


def held_objects(model: nn.Module) -> Iterator[tuple[Path, Any]]:
    """Yield each module, and each value that its attributes hold, with its path, once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        path = tuple(Step(name) for name in prefix.split(".") if name)
        yield path, module
        for name, value in module.__dict__.items():
            if name not in INTERNAL:
                yield from _inside_of((*path, Step(name)), value, DEPTH_MAX, seen)


def _inside_of(path: Path, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    inside = inside_of(value)
    if not isinstance(value, torch.Tensor) and (inside is None or isinstance(value, set | frozenset)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield path, value
    if inside is None or not depth:
        return
    for key, item in inside.items() if isinstance(inside, dict) else enumerate(inside):
        yield from _inside_of((*path, Step(key, is_item=inside is value)), item, depth - 1, seen)


def held_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that modules hold as plain attributes, also inside of containers and objects, with their names."""
    yield from ((format_path(path), value) for path, value in held_objects(model) if isinstance(value, torch.Tensor))


def copies_of_computed(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies, by id, of the tensors that modules hold and that have a gradient: deepcopy does not copy them."""
    return {id(held): held.detach().clone() for _, held in held_tensors(model) if not held.is_leaf}


def inside_of(value: Any) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
    """Return what a container or plain object holds; None for other values."""
    if isinstance(value, enum.Enum | type | nn.Module | torch.Tensor) or callable(value):
        return None
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if not isinstance(value, list | tuple | dict):
        value = getattr(value, "__dict__", None)
    return value if isinstance(value, list | tuple | dict) and len(value) <= ITEMS_MAX else None
