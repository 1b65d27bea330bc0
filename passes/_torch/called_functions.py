"""The functions of torch that Python code calls, in order: dynamo's graph of the code has one node for each."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import _compile_session_context
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What code asks of a tensor that is a number, and no call of a graph.
_QUESTIONS = frozenset(
    {"size", "dim", "stride", "numel", "nelement", "ndimension", "len", "element_size", "storage_offset", "get_device"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_signed"}
)
_SPELLINGS = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "absolute": "abs",
    "negative": "neg",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "iand": "and_",
    "ior": "or_",
}
_OPERATORS = (operator.and_, operator.or_)  # spelled so as their names are words of Python


@dataclass(frozen=True)
class CalledFunction:
    """A call of a function of torch, its name as `name_of` spells it, and what it returned."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


def name_of(target: Any) -> str:
    """Return the name of a function, an operator or a method, spelled in one way: "add" for `operator.add`,
    `torch.add` and `Tensor.__add__`.
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if target in _OPERATORS:
        name = name.rstrip("_")
    name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    return _SPELLINGS.get(name, name)


@contextmanager
def called_functions() -> Iterator[list[CalledFunction]]:
    """Collect the functions of torch that are called until the block ends, but for those that return no tensor's value.

    Code sees that it is compiled and exported, as when dynamo traces it.
    """
    watch, before = _Watch(), torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        with _compile_session_context(), watch:
            yield watch.called
    finally:
        torch.compiler._is_exporting_flag = before


def _is_reflected(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    is_operator = name[3:-2] == "div" or hasattr(operator, f"__{name[3:]}")
    return name.startswith("__r") and name.endswith("__") and is_operator


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[CalledFunction] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, has_gradients = kwargs or {}, torch.is_grad_enabled()
        result = function(*args, **kwargs)
        name = name_of(function)
        is_question = name in _QUESTIONS
        if name == "_set_grad_enabled" and torch.is_grad_enabled() == has_gradients:
            return result  # as dynamo, which leaves out what changes no mode
        if name == "get" and hasattr(function, "__self__"):  # of an attribute of a tensor
            name, args, is_question = "getattr", (args[0], function.__self__.__name__), True
        if not is_question or any(isinstance(one, torch.Tensor) for one in tree_leaves(result)):
            if _is_reflected(function):  # 1 - x is x.__rsub__(1)
                name, args = _SPELLINGS.get(name[1:], name[1:]), (args[1], args[0])
            self.called.append(CalledFunction(function, name, tuple(args), kwargs, result))
        return result
