"""Have dynamo note what traced code asks for and does not find, and what it reads from Python's library: where dynamo takes
that for granted, it has no guard that tells of the read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import ObservedAttributeError, raise_observed_exception
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.builtin import GetAttrBuiltinVariable, HasAttrBuiltinVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable

from passes._torch.patches import replaced

_ITEM: Any = ConstDictVariable.getitem_const_raise_exception_if_absent
_GETATTR: Any = GetAttrBuiltinVariable._call_getattr
_HASATTR: Any = HasAttrBuiltinVariable.call_function
_OF_LIST: Any = CommonListMethodsVariable.call_method
_BUILTIN: Any = InstructionTranslatorBase.load_builtin_from_argval
_LOAD = "generic_getattr"  # reads the attributes that code names, in torch 2.14


@contextmanager
def guard_absences() -> Iterator[None]:
    """Add guards for keys and attributes that are looked for, and for globals of Python's library."""
    with ExitStack() as stack:
        stack.enter_context(replaced(ConstDictVariable, "getitem_const_raise_exception_if_absent", _item))
        stack.enter_context(replaced(GetAttrBuiltinVariable, "_call_getattr", _getattr))
        stack.enter_context(replaced(HasAttrBuiltinVariable, "call_function", _hasattr))
        stack.enter_context(replaced(CommonListMethodsVariable, "call_method", _of_list))
        stack.enter_context(replaced(InstructionTranslatorBase, "load_builtin_from_argval", _builtin))
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


def _of_list(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Guard the keys of a dict that a list is made of: `list(table)`, `[*table]`."""
    for given in args if name in ("__init__", "extend") else ():
        if isinstance(given.realize(), ConstDictVariable):
            given.realize().install_dict_keys_match_guard()
    return _OF_LIST(variable, tx, name, args, kwargs)


def _builtin(tx: Any, name: str) -> Any:
    if name not in tx.f_builtins and "__name__" in tx.f_globals:
        _guard_source(tx.import_source(tx.f_globals["__name__"]), name)
        raise_observed_exception(NameError, tx, args=[f"name {name!r} is not defined"])
    return _BUILTIN(tx, name)


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
        _guard_source(owner.source, name)


def _guard_source(source: Any, name: str) -> None:
    try:
        guard = source.make_guard(partial(GuardBuilder.HASATTR, attr=name))
    except NotImplementedError:
        return  # a constant, or a value that is made while it is traced
    install_guard(guard)
