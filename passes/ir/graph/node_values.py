"""The fake values of nodes, and their operands."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from passes.errors import CompilerError
from passes.ir.graph.facts import layout_of, layouts_of
from passes.ir.layout import Layout

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NUMBERS = (int, float)


def value_of(node: Node) -> Any:
    """Return the fake tensor (or tuple of them, or number) that is the node's result."""
    return node.meta["val"]


def has_value(node: Node) -> bool:
    return "val" in node.meta


def set_value(node: Node, value: Any) -> None:
    node.meta["val"] = value


def tensor_of(node: Node) -> torch.Tensor:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise CompilerError(f"%{node.name} is not a tensor but {type(value).__name__}")
    return value


def results_of(node: Node) -> tuple[torch.Tensor, ...]:
    """Return the tensor results: one, or those of a tuple (an element that is no tensor is left out)."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        return tuple(v for v in value if isinstance(v, torch.Tensor))
    return ()


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def operands(node: Node) -> tuple[Node, ...]:
    """Return the tensor operands in order of appearance in args, then kwargs; a node used twice appears twice.

    A node whose value is a number (attention's `max_q`) is no operand.
    """
    found: list[Node] = []
    for value in node.args:
        if isinstance(value, Node):
            found.append(value)
        elif not isinstance(value, _PLAIN):
            _collect(value, found)
    if node.kwargs:
        _collect(node.kwargs, found)
    return tuple([value for value in found if not isinstance(value.meta.get("val"), _NUMBERS)])


def _collect(value: Any, found: list[Node]) -> None:
    if isinstance(value, Node):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)


def item_of(node: Node) -> tuple[Node, int] | None:
    """Return the node that a `getitem` takes a tensor from, and the tensor's position among its `results_of`."""
    if node.target is not operator.getitem or not is_tensor(node):
        return None
    source, index = node.args
    assert isinstance(source, Node) and isinstance(index, int)
    return source, sum(isinstance(value, torch.Tensor) for value in value_of(source)[:index])


def layout_given(user: Node, operand: Node) -> Layout:
    """Return the layout in which `user` gets `operand`: for a `getitem`, that of the item."""
    item = item_of(user)
    return layouts_of(item[0])[item[1]] if item is not None else layout_of(operand)


def values_in(argument: Any) -> Any:
    """Return the arguments of a call with each node replaced by its value; sequences become lists."""
    if isinstance(argument, Node):
        return value_of(argument)
    if isinstance(argument, tuple | list):
        return [values_in(item) for item in argument]
    if isinstance(argument, dict):
        return {key: values_in(item) for key, item in argument.items()}
    return argument
