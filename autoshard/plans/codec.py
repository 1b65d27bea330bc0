"""Encode frozen dataclasses as JSON values, and decode them by their declared types.

A dataclass becomes an object, a tuple a list, a layout text (`"S(0) R"`, one placement per axis), a mesh its axes; a
placement and a dtype are text as in a graph. Decoding checks every value against its declared type. A field that is
declared `UNSAVED` is not written, and has its default when read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from passes.errors import PlanError, UserError
from passes.hardware.hardware import Hardware
from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.text import ALL_DTYPES, DTYPE_NAMES

T = TypeVar("T")

UNSAVED: Mapping[str, bool] = types.MappingProxyType({"unsaved": True})  # metadata of a field

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def encode(value: object) -> Any:
    """Return a value of declared types in the form that `json` writes."""
    if type(value) in _NAMES:
        return value
    if isinstance(value, Layout):
        return " ".join(map(str, value.placements))
    if isinstance(value, Replicate | Shard | Partial):
        return str(value)
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    if isinstance(value, Mesh):
        ranks = None if value.ranks == tuple(range(value.size)) else list(value.ranks)
        return {"axes": str(value), "ranks": ranks, "hardware": encode(value.hardware)}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _saved(type(value))}
    if isinstance(value, Mapping):
        return {key: encode(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [encode(one) for one in value]
    return value


@cache
def _saved(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields that are written."""
    return tuple(field.name for field in fields(kind) if "unsaved" not in field.metadata)


def decode(kind: type[T], data: object, where: str = "") -> T:
    """Return the value of type `kind` that `encode` was called with.

    Raises PlanError that names the place (`cost.memory.inputs`) of a value that is missing, unexpected or of another
    type.
    """
    declared: Any = kind
    value: T = _decoder(declared)(data, where)
    return value


@cache
def _decoder(kind: Any) -> Callable[[Any, str], Any]:
    arguments = get_args(kind)
    if kind is object:
        return lambda data, where: data
    if kind in _NAMES:
        return lambda data, where: _scalar(kind, data, where)
    if kind is Layout:
        return _layout
    if kind == Placement:
        return _placement
    if kind is torch.dtype:
        return _dtype
    if kind is Mesh:
        return _mesh
    if get_origin(kind) in (Union, types.UnionType):
        return _optional(arguments)
    if get_origin(kind) is tuple:
        return _repeated(_decoder(arguments[0])) if arguments[-1] is ... else _fixed(tuple(map(_decoder, arguments)))
    if get_origin(kind) is Mapping:
        return _mapping(_decoder(arguments[1]))
    assert is_dataclass(kind), f"a plan file cannot hold {kind}"
    return _dataclass(kind)


def _scalar(kind: type, data: Any, where: str) -> Any:
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise _wrong(where, _NAMES[kind], data)
    return data


def _wrong(where: str, expected: str, data: object) -> PlanError:
    text = repr(data)
    return PlanError(f"{where or 'the whole'} is {text if len(text) < 40 else text[:36] + ' ...'}, not {expected}")


def _layout(data: Any, where: str) -> Layout:
    try:
        return _read_layout(_scalar(str, data, where))
    except UserError as error:
        raise _wrong(where, "a layout such as 'S(0) R'", data) from error


def _placement(data: Any, where: str) -> Placement:
    try:
        return parse_placement(_scalar(str, data, where))
    except UserError as error:
        raise _wrong(where, "a placement such as 'S(0)'", data) from error


def _dtype(data: Any, where: str) -> torch.dtype:
    if data not in ALL_DTYPES:
        raise _wrong(where, "a dtype such as 'bf16'", data)
    return ALL_DTYPES[data]


@cache
def _read_layout(text: str) -> Layout:
    return Layout(tuple(map(parse_placement, text.split())))


def _mesh(data: Any, where: str) -> Mesh:
    axes = decode(str, _member(data, "axes", where), f"{where}.axes")
    ranks = _decoder(tuple[int, ...] | None)(_member(data, "ranks", where), f"{where}.ranks")
    hardware = _decoder(Hardware | None)(_member(data, "hardware", where), f"{where}.hardware")
    try:
        return Mesh(axes, ranks=ranks, hardware=hardware)
    except UserError as error:
        raise PlanError(f"{where}: {error}") from error


def _member(data: Any, name: str, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    if name not in data:
        raise PlanError(f"{_inside(where, name)} is missing")
    return data[name]


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _optional(kinds: tuple[Any, ...]) -> Callable[[Any, str], Any]:
    (kind,) = (one for one in kinds if one is not type(None))
    inner = _decoder(kind)
    return lambda data, where: None if data is None else inner(data, where)


def _repeated(inner: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, list):
            raise _wrong(where, "a list", data)
        return tuple(inner(item, f"{where}[{i}]") for i, item in enumerate(data))

    return read


def _fixed(inner: tuple[Callable[[Any, str], Any], ...]) -> Callable[[Any, str], Any]:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, list) or len(data) != len(inner):
            raise _wrong(where, f"a list of {len(inner)}", data)
        return tuple(one(item, f"{where}[{i}]") for i, (one, item) in enumerate(zip(inner, data, strict=True)))

    return read


def _mapping(inner: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        return {name: inner(item, f"{where}.{name}") for name, item in data.items()}

    return read


def _dataclass(kind: Any) -> Callable[[Any, str], Any]:
    hints = get_type_hints(kind)
    inner = {name: _decoder(hints[name]) for name in _saved(kind)}

    def read(data: Any, where: str) -> Any:
        members = {name: _member(data, name, where) for name in inner}
        if extra := [name for name in data if name not in inner]:
            raise PlanError(f"{_inside(where, extra[0])} is not known")
        return kind(**{name: one(members[name], _inside(where, name)) for name, one in inner.items()})

    return read
