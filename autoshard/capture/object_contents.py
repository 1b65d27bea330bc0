"""Say what a Python object holds, whatever its class: its items, its attributes, its slots, or a state of its own.

All that compares objects asks here: the check before each call of a model, and the check that a run of its code changed
nothing.
"""

from __future__ import annotations

import enum
import logging
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.capture.signature import is_constant

_COMPILED = {"_is_torch_compile", "_compiled_call_impl"}  # what `torch.compile` and `compile()` of a module set
# Attributes that every module has or may have, beside those of its class.
INTERNAL = (frozenset(nn.Module().__dict__) | {"_autoshard"} | _COMPILED) - {"training"}
# Objects that do not change, and those that are compared as a whole or by a guard of their own.
_CLOSED = (BuiltinFunctionType, CodeType, ModuleType, type, logging.Logger, torch.Tensor, PurePath, re.Pattern)
CONTAINERS = (dict, list, tuple, deque, set, frozenset, MappingProxyType)
_PARTS = ("_parameters", "_buffers", "_modules")
_STANDARD = {*sys.stdlib_module_names, "numpy"}
_members: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Step:
    """One step from an object to another that it holds: an attribute, or an item of a list or dict.

    `is_named` says whether code that takes the step has the attribute's name in it; the call of a bound method reads
    `__self__` and does not name it.
    """

    key: Any
    is_item: bool = False
    is_named: bool = True


class State:
    """The state of an object that holds neither attributes nor items: an array's values, a counter, an iterator."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__
        if isinstance(value, np.ndarray):
            self.seen: Any = (value.dtype, value.shape, hash(value.tobytes()))
            return
        try:
            self.seen = repr(value.__reduce_ex__(4))
        except Exception:  # each class says in its own way that it has no state to tell
            self.seen = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and bool(self.seen == other.seen)

    def __hash__(self) -> int:
        return hash(self.seen)

    def __repr__(self) -> str:
        return f"a {self.kind}"


def contents_of(value: Any) -> dict[Step, Any] | None:
    """Return what an object holds, by the step to it; None for one that is known not to change."""
    if isinstance(value, enum.Enum):
        return {Step(key): item for key, item in vars(value).items() if key[0] != "_"} or None
    if is_constant(value) or isinstance(value, _CLOSED):
        return None
    found = _items(value) | attributes_of(value)
    if _has_state(value, found):
        found[Step("", is_item=True)] = State(value)
    return found


def _has_state(value: Any, found: dict[Step, Any]) -> bool:
    """Return whether an object has a state besides what was found in it, which it can tell at little cost."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if found or isinstance(value, (*CONTAINERS, FunctionType)):
        return False
    return any(one.__module__.partition(".")[0] in _STANDARD for one in type(value).__mro__[:-1])


def _items(value: Any) -> dict[Step, Any]:
    if isinstance(value, dict | MappingProxyType):
        return {Step(key, is_item=True): item for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return {Step(number, is_item=True): item for number, item in enumerate(value)}
    if isinstance(value, set | frozenset):
        return {Step(item, is_item=True): item for item in value}
    if isinstance(value, ContextVar):
        return {Step("get", is_item=True): value.get(None)}
    if isinstance(value, weakref.ref):
        return {Step("target", is_item=True): value()}
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return {Step(number, is_item=True): item for number, item in enumerate(value.flat)}
    return {}


def attributes_of(value: Any) -> dict[Step, Any]:
    """Return the attributes of an object: those in its `__dict__`, its slots, and the parts of a module."""
    inside = dict_of(value)
    if isinstance(value, nn.Module):
        assert inside is not None
        own = {Step(name): item for name, item in inside.items() if name not in INTERNAL}
        hooks = {Step(name, is_named=False): item for name, item in inside.items() if name.endswith("_hooks") and item}
        return own | hooks | {Step(name): item for part in _PARTS for name, item in inside[part].items()}
    found = {} if inside is None else {Step(name): item for name, item in inside.items()}
    is_named = type(value).__module__.partition(".")[0] not in _STANDARD
    for name in () if isinstance(value, FunctionType) else members_of(type(value)):
        try:
            found[Step(name, is_named=is_named)] = getattr(value, name)
        except AttributeError:  # a slot that is not set
            continue
    return found


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes, if it has one."""
    try:
        inside = value.__dict__
    except (AttributeError, ReferenceError):  # the latter of a weak proxy whose object is gone
        return None
    return inside if isinstance(inside, dict) else None


def members_of(kind: type) -> tuple[str, ...]:
    """Return the names of a class's slots, and of what a class that is written in C holds, such as `partial.keywords`."""
    if kind not in _members:
        found = (name for one in kind.__mro__ for name, member in vars(one).items() if isinstance(member, MemberDescriptorType))
        _members[kind] = tuple(name for name in dict.fromkeys(found) if name != "__dict__")
    return _members[kind]


def dicts_of(value: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts in which a change of an object's items or attributes is written."""
    if isinstance(value, dict):
        yield value
    inside = dict_of(value)
    if inside is not None:
        yield inside
        if isinstance(value, nn.Module):
            yield from (inside[name] for name in _PARTS)
            yield from (item for name, item in inside.items() if name.endswith("_hooks"))
