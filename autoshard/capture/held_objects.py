"""Walk over the Python objects that a model's modules hold in their attributes: lists, dicts, and plain objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FunctionType, MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import nn

from autoshard.capture.object_contents import INTERNAL, Step, contents_of

DEPTH_MAX = 4  # attributes of attributes whose tensors are inputs of a graph: `self.config.rope.theta` has 3
ITEMS_MAX = 1000  # items of a container whose tensors are; a larger one is data
_REACHED = (dict, list, tuple, deque, MappingProxyType)  # containers whose items have a key or number
_SHARED = (FunctionType, nn.Module, ref)  # a copy of a model holds the same ones, or they have tensors of their own

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
    """Yield each module, and each value that its attributes hold, with its path, once.

    Left out is what `is_near` says no of; `reachable_tensors` has the tensors there, too.
    """
    seen: dict[int, int] = {}
    for prefix, module in model.named_modules():
        path = tuple(Step(name) for name in prefix.split(".") if name)
        yield path, module
        for name, value in module.__dict__.items():
            if name not in INTERNAL:
                yield from _inside_of((*path, Step(name)), value, DEPTH_MAX, seen)


def _inside_of(path: Path, value: Any, depth: int, seen: dict[int, int]) -> Iterator[tuple[Path, Any]]:
    contents = contents_of(value)
    if not isinstance(value, torch.Tensor) and (contents is None or isinstance(value, _SHARED)):
        return
    before = seen.get(id(value), -1)
    if before >= depth:
        return
    seen[id(value)] = depth
    if before < 0:
        yield path, value
    for step, item in (contents or {}).items():
        if is_near(value, step, depth):
            yield from _inside_of((*path, step), item, depth - 1, seen)


def is_near(value: Any, step: Step, depth: int) -> bool:
    """Return whether a step from a value, with `depth` steps left, leads to what `held_objects` yields."""
    if isinstance(value, _SHARED) or depth <= 0:
        return False
    return not step.is_item or (isinstance(value, _REACHED) and len(value) <= ITEMS_MAX)


def reachable_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that attributes of modules hold, however deep, and in modules that are no submodules."""
    seen = set(map(id, model.modules()))
    left = [value for module in model.modules() for name, value in module.__dict__.items() if name not in INTERNAL]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        left += (contents_of(value) or {}).values()


def held_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that modules hold as plain attributes, also inside of containers and objects, with their names."""
    yield from ((format_path(path), value) for path, value in held_objects(model) if isinstance(value, torch.Tensor))


def copies_of_computed(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies, by id, of the tensors that modules hold and that have a gradient: deepcopy does not copy them."""
    return {id(held): held.detach().clone() for _, held in held_tensors(model) if not held.is_leaf}
