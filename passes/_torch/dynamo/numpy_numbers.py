"""Let dynamo take numpy's numbers, such as an element of an array or what `np.sqrt` gives, for numbers.

It takes them for tensors, of which a model may not ask the value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._dynamo.variables import ConstantVariable, GetAttrVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import BaseListVariable

from passes._torch.patches import replaced

_WRAP, _CALL = VariableBuilder._wrap, TorchInGraphFunctionVariable.call_function
# Functions that make a tensor of the number's dtype, with the name of its argument.
_MADE_OF: dict[Any, str] = {torch.tensor: "data", torch.as_tensor: "data", torch.asarray: "obj"}


# The method of dynamo's values that reads an attribute, in torch 2.13 and in 2.14.
READ_ATTRIBUTE = "var_getattr" if hasattr(ConstantVariable, "var_getattr") else "tp_getattro_impl"


class NumpyNumber(ConstantVariable):
    """A number of numpy's: computed with as one of Python's."""

    def __init__(self, value: Any, number: Any, **kwargs: Any) -> None:
        super().__init__(value, **kwargs)
        self.number = number

    def python_type(self) -> type:
        return type(self.number)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a method that only numpy's have, such as `item` and `astype`."""
        if name.startswith("__") or hasattr(self.value, name):
            return super().call_method(tx, name, args, kwargs)
        given = {key: one.as_python_constant() for key, one in kwargs.items()}
        return _variable(getattr(self.number, name)(*(one.as_python_constant() for one in args), **given))

    def var_getattr(self, tx: Any, name: str) -> Any:
        """Return an attribute that only numpy's have, such as `ndim`."""
        if hasattr(self.value, name):
            return getattr(super(), READ_ATTRIBUTE)(tx, name)
        found = getattr(self.number, name)
        return GetAttrVariable(self, name) if callable(found) else _variable(found)

    tp_getattro_impl = var_getattr


@contextmanager
def numpy_numbers() -> Iterator[None]:
    """Trace numpy's numbers as numbers until the block ends."""
    with replaced(VariableBuilder, "_wrap", _wrap), replaced(TorchInGraphFunctionVariable, "call_function", _call_function):
        yield


def _wrap(builder: Any, value: Any) -> Any:
    if not isinstance(value, np.number | np.bool_) or isinstance(value.item(), np.number):  # the latter is of more bits
        return _WRAP(builder, value)
    plain = _WRAP(builder, value.item())
    return NumpyNumber(plain.value, value, source=plain.source) if type(plain) is ConstantVariable else plain


def _variable(value: Any) -> Any:
    return NumpyNumber(value.item(), value) if isinstance(value, np.number | np.bool_) else ConstantVariable.create(value)


def _call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    name = _MADE_OF.get(variable.value) if isinstance(variable.value, Hashable) else None
    if name is not None and "dtype" not in kwargs:
        dtype = _dtype(args[0] if args else kwargs.get(name))
        if dtype is not None:
            kwargs = {**kwargs, "dtype": ConstantVariable.create(dtype)}
    return _CALL(variable, tx, args, kwargs)


def _dtype(given: Any) -> torch.dtype | None:
    """Return the dtype of a tensor that is made of a number of numpy's, or of a list of such numbers; None for others."""
    given = given.realize() if given is not None else None
    if isinstance(given, BaseListVariable):
        found = {_dtype(item) for item in given.items}
        return found.pop() if len(found) == 1 else None
    return torch.as_tensor(given.number).dtype if isinstance(given, NumpyNumber) else None
