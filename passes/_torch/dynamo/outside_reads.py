"""Find the globals, class attributes and closure variables that traced code depends on, from dynamo's guards."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import contains, getitem
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.source import (
    AttrSource,
    CellContentsSource,
    ClosureSource,
    ConstDictKeySource,
    DefaultsSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    LocalSource,
    NNModuleSource,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
)
from torch._guards import Guard, Source

from passes._torch.dynamo.side_effects import source_name
from passes._torch.results import OUTSIDE_GONE, Keys, OutsideRead

_ENVIRONMENT = ((getattr, "environ"), (getattr, "_data"))  # where `os` holds the variables of the environment
_HAS_KEY = {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"}
_HAS_KEYS = {"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"}
_Steps = tuple[tuple[Callable[[Any, Any], Any], Any], ...]
_Place = tuple[Any, _Steps, str]  # a root, steps from it, and the name of what is there


def outside_reads(
    guards: Iterator[Guard], module: torch.nn.Module, imports: Mapping[str, str]
) -> tuple[OutsideRead, ...]:
    """Return the values that a trace of `module` read from Python modules, classes and enclosing functions, and whether there
    was what it looked for.

    `imports` maps dynamo's names of Python modules to theirs. Of torch's own modules and Python's library, public settings
    are taken, and variables of the environment; that is, constants, and of the latter lengths, keys and which keys there are.
    """
    found: dict[Any, OutsideRead] = {}  # by place, as two classes may have one name
    for guard in guards:
        try:
            root, steps, name = _place_of_guard(guard, module, imports)
            asked, words = _question(guard)
            held, read = OutsideRead(name, root, steps), OutsideRead(name + words, root, steps + asked)
            is_computed = held.value() is not held.value()  # at each read
            value = read.value()
        except OUTSIDE_GONE:
            continue  # not a place that has a path
        if root is module or not read.steps or is_computed:
            continue
        if root is os and steps[:2] == _ENVIRONMENT:
            if asked or len(steps) > 2:
                found[id(root), read.steps] = _variable(read, words)
        elif _is_of_user(root) or _is_setting(read, value, guard.create_fn_name(), is_asked=bool(asked)):
            found[id(root), read.steps] = read
    return tuple(found.values())


def _place_of_guard(guard: Guard, module: torch.nn.Module, imports: Mapping[str, str]) -> _Place:
    """Return where the value of a guard was read; of a Python module, the name that it has in another."""
    source = guard.originating_source
    if guard.create_fn_name() == "MODULE_MATCH" and isinstance(source, AttrSource):
        root, steps, name = _place(source.base, module, imports)
        return root, (*steps, (getattr, source.member)), f"{name}.{source.member}"
    return _place(source, module, imports)


def _question(guard: Guard) -> tuple[_Steps, str]:
    """Return what a guard asks of a value, as steps and in words; nothing, if it compares the value itself."""
    kind = guard.create_fn_name()
    given: Mapping[str, Any] = guard.create_fn.keywords if isinstance(guard.create_fn, partial) else {}
    if kind == "HASATTR":
        return ((hasattr, given["attr"]),), f" has {given['attr']}"
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return ((getattr, "__dict__"), (contains, given["attr"])), f" itself has {given['attr']}"
    if kind in _HAS_KEY and isinstance(guard.originating_source, TypeDictSource):
        return ((getattr, "__dict__"), (contains, given["key"])), f" itself has {given['key']}"
    if kind in _HAS_KEY:
        return ((contains, given["key"]),), f" has {_named(given['key'])}"
    return (((_keys, None),), " (keys)") if kind in _HAS_KEYS else ((), "")


def _keys(held: Any, _: None) -> Keys:
    return Keys(tuple(held))


def _variable(read: OutsideRead, words: str) -> OutsideRead:
    """Return what is read of the environment under the name that users know it by."""
    (step, key), *_ = read.steps[2:]
    name = repr(os.fsdecode(key)) if isinstance(key, bytes) else repr(key)
    words = f" has {name}" if step is contains else f"[{name}]" if step is getitem else words
    return OutsideRead(f"os.environ{words}", read.root, read.steps)


def _is_setting(read: OutsideRead, value: Any, kind: str, *, is_asked: bool) -> bool:
    """Return whether a value that torch or Python's library holds is one that users set."""
    names = (_module_name(read.root), *(key for step, key in read.steps if step is getattr))
    if any(part.startswith("_") for name in names for part in name.split(".")):
        return False
    is_of_python = names[0].partition(".")[0] != "torch"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return is_of_python or not is_asked
    return is_of_python and kind in {"SEQUENCE_LENGTH", *_HAS_KEYS}


def level_read(logger: logging.Logger, method: str, given: tuple[Any, ...]) -> OutsideRead:
    """Return the call of a method that asks for the level of a logger."""
    name = f"logging.getLogger({logger.name!r}).{method}({', '.join(map(repr, given))})"
    return OutsideRead(name, logger, ((getattr, method), (_result, given)))


def _result(method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    return method(*given)


def readable_name(source: Source, module: torch.nn.Module, imports: Mapping[str, str]) -> str:
    """Return dynamo's name for where a value comes from; for a variable of an enclosing function, the names of both."""
    name = source_name(source)
    if ".__closure__[" not in name:
        return name
    try:
        return re.sub(r"\._(?:modules|parameters|buffers)\.", ".", _place(source, module, imports)[2])
    except OUTSIDE_GONE:
        return name


def _place(source: Source, module: torch.nn.Module, imports: Mapping[str, str]) -> _Place:
    """Return where dynamo read a value. Raises LookupError for a source that is no attribute, item or variable."""

    def value(base: Source) -> Any:
        return OutsideRead("", *_place(base, module, imports)[:2]).value()

    match source:
        case LocalSource(local_name="self"):
            return module, (), ""
        case GlobalSource(global_name=name):
            return _root(sys.modules[imports[name]])
        case TypeSource(base=base):
            return _root(type(value(base)))
        case TypeDictSource(base=base):
            return _root(value(base))
        case GetItemSource(base=TypeMROSource(base=base), index=number):
            return _root(value(base).__mro__[number])
        case GetItemSource(base=ClosureSource(base=base), index=number):
            return value(base).__closure__[number], (), _place(base, module, imports)[2].rpartition(".")[0]
        case CellContentsSource(base=base, freevar_name=variable):
            cell, _, name = _place(base, module, imports)
            return cell, ((getattr, "cell_contents"),), f"{name}.{variable}"
        case NNModuleSource(base=base):
            return _place(base, module, imports)
        case DefaultsSource(base=base, field=kind, idx_key=key):
            root, steps, name = _place(base, module, imports)
            return root, (*steps, (getattr, kind), (getitem, key)), f"{name}.{kind}.{key}"
        case AttrSource(base=base, member=key) | DictGetItemSource(base=base, index=key) | GetItemSource(base=base, index=key):
            if isinstance(key, ConstDictKeySource):
                key = tuple(value(key.base))[key.index]
            elif isinstance(key, Source):
                key = value(key)
            root, steps, name = _place(base, module, imports)
            is_item = not isinstance(source, AttrSource) and not isinstance(base, TypeDictSource)
            found = OutsideRead("", root, (*steps, (getitem if is_item else getattr, key)))
            inner = found.value()
            named = key if isinstance(key, str) else _named(key)
            return _root(inner) if isinstance(inner, ModuleType) else (root, found.steps, f"{name}.{named}")
        case _:
            raise LookupError(source)


def _named(key: Any) -> str:
    """Return a name of a key that is the same on all ranks: no address of an object, no order of a set."""
    return repr(key) if isinstance(key, str | bytes | int | float | None) else getattr(key, "__qualname__", type(key).__name__)


def _root(found: Any) -> _Place:
    return found, (), found.__name__ if isinstance(found, ModuleType) else found.__qualname__


def _is_of_user(root: Any) -> bool:
    """Return whether a Python module, class or variable of a function belongs neither to torch nor to the standard library."""
    return _module_name(root).partition(".")[0] not in {"torch", *sys.stdlib_module_names} - {"__main__"}


def _module_name(root: Any) -> str:
    return str(getattr(root, "__name__" if isinstance(root, ModuleType) else "__module__", ""))
