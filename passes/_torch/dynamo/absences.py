"""Have dynamo note what traced code asks for and does not find, and what it reads from Python's library: where dynamo takes
that for granted, it has no guard that tells of the read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.builtin import GetAttrBuiltinVariable, HasAttrBuiltinVariable
from torch._dynamo.variables.dicts import ConstDictVariable

from passes._torch.patches import replaced

_ITEM: Any = ConstDictVariable.getitem_const_raise_exception_if_absent
_GETATTR: Any = GetAttrBuiltinVariable._call_getattr
_HASATTR: Any = HasAttrBuiltinVariable.call_function
_LOAD = "generic_getattr"  # reads the attributes that code names, in torch 2.14


@contextmanager
def guard_absences() -> Iterator[None]:
    """Add guards for keys and attributes that are looked for, and for globals of Python's library."""
    with ExitStack() as stack:
        stack.enter_context(replaced(ConstDictVariable, "getitem_const_raise_exception_if_absent", _item))
        stack.enter_context(replaced(GetAttrBuiltinVariable, "_call_getattr", _getattr))
        stack.enter_context(replaced(HasAttrBuiltinVariable, "call_function", _hasattr))
        stack.enter_context(replaced(symbolic_convert, "is_stdlib", lambda module: False))
        if _LOAD in vars(symbolic_convert):
            stack.enter_context(replaced(symbolic_convert, _LOAD, partial(_load, vars(symbolic_convert)[_LOAD])))
        yield


def _item(variable: Any, tx: Any, key: Any) -> Any:
    if key not in variable:
        variable.install_dict_contains_guard(tx, [key])
    return _ITEM(variable, tx, key)


def _getattr(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 2:
        _guard_attribute(*args[:2])
    try:
        return _GETATTR(variable, tx, args, kwargs)
    except ObservedAttributeError:
        _guard_attribute(*args[:2])
        raise


def _hasattr(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    _guard_attribute(*args[:2])
    return _HASATTR(variable, tx, args, kwargs)


def _load(original: Any, tx: Any, owner: Any, name: str, *default: Any) -> Any:
    try:
        return original(tx, owner, name, *default)
    except ObservedAttributeError:
        _guard(owner, name)
        raise


def _guard_attribute(owner: Any, name: Any) -> None:
    if name.is_python_constant() and isinstance(name.as_python_constant(), str):
        _guard(owner.realize(), name.as_python_constant())


def _guard(owner: Any, name: str) -> None:
    if owner.source is not None and not owner.is_tensor():
        install_guard(owner.source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
