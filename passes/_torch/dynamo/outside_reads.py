"""Find the globals, class attributes and closure variables that traced code depends on, from dynamo's guards."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.source import (
    AttrSource,
    CellContentsSource,
    ClosureSource,
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
from passes._torch.results import OUTSIDE_GONE, OutsideRead

# Guards on constants, functions, classes and tensors, on types of objects, and on lengths.
_VALUES = {
    "BUILTIN_MATCH",
    "CLASS_MATCH",
    "CLOSURE_MATCH",
    "CONSTANT_MATCH",
    "EQUALS_MATCH",
    "FUNCTION_MATCH",
    "ID_MATCH",
    "SEQUENCE_LENGTH",
    "TENSOR_MATCH",
    "TYPE_MATCH",
}
_ENVIRONMENT = (("environ", False), ("_data", False))  # where `os` holds the variables of the environment
_Place = tuple[Any, tuple[tuple[Any, bool], ...], str]  # a root, steps from it, and the name of what is there


def outside_reads(
    guards: Iterator[Guard], module: torch.nn.Module, imports: Mapping[str, str]
) -> tuple[OutsideRead, ...]:
    """Return the values that a trace of `module` read from Python modules, classes and enclosing functions.

    `imports` maps dynamo's names of Python modules to theirs. What torch's own modules hold is left out.
    """
    found: dict[Any, OutsideRead] = {}  # by place, as two classes may have one name
    for guard in guards:
        if guard.create_fn_name() in _VALUES and guard.originating_source is not None:
            try:
                root, steps, name = _place(guard.originating_source, module, imports)
            except OUTSIDE_GONE:
                continue  # not a place that has a path
            is_variable = root is os and steps[:2] == _ENVIRONMENT and len(steps) == 3  # of the environment
            read = OutsideRead(f"os.environ[{os.fsdecode(steps[2][0])!r}]" if is_variable else name, root, steps)
            is_outside = root is not module and bool(steps) and (is_variable or _is_of_user(root))
            if is_outside and read.value() is read.value():  # not computed at each read
                found[id(root), steps] = read
    return tuple(found.values())


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
            return cell, (("cell_contents", False),), f"{name}.{variable}"
        case NNModuleSource(base=base):
            return _place(base, module, imports)
        case AttrSource(base=base, member=key) | DictGetItemSource(base=base, index=key) | GetItemSource(base=base, index=key):
            if isinstance(key, Source) or key == "__defaults__":
                raise LookupError(source)
            root, steps, name = _place(base, module, imports)
            is_item = not isinstance(source, AttrSource) and not isinstance(base, TypeDictSource)
            found = OutsideRead("", root, (*steps, (key, is_item)))
            inner = found.value()
            return _root(inner) if isinstance(inner, ModuleType) else (root, found.steps, f"{name}.{key}")
        case _:
            raise LookupError(source)


def _root(found: Any) -> _Place:
    return found, (), found.__name__ if isinstance(found, ModuleType) else found.__qualname__


def _is_of_user(root: Any) -> bool:
    """Return whether a Python module, class or variable of a function belongs neither to torch nor to the standard library."""
    name = getattr(root, "__name__" if isinstance(root, ModuleType) else "__module__", "")
    return name.partition(".")[0] not in {"torch", *sys.stdlib_module_names} - {"__main__"}
