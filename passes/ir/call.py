"""The call of an op that a rule is asked about: its arguments, with global shapes in place of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.ir.graph import results_of, value_of


@dataclass(frozen=True)
class Tensor:
    """Global shape and dtype of an operand or result."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """An op with its arguments, with a `Tensor` in place of each tensor."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Return the tensor arguments in order of appearance in args, then kwargs."""
        found: list[Tensor] = []
        _collect((self.args, self.kwargs), found)
        return tuple(found)

    @property
    def result(self) -> Tensor:
        return self.results[0]

    def arg(self, name: str) -> Any:
        """Return an argument by its name in the schema, or its default if it was not given."""
        for i, parameter in enumerate(self.op._schema.arguments):
            if parameter.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                return self.args[i] if i < len(self.args) and not parameter.kwarg_only else parameter.default_value
        raise KeyError(f"{self.op} has no argument {name!r}")


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def call_of(node: Node) -> Call:
    """Return the call that `node` makes, in global shapes."""
    assert isinstance(node.target, OpOverload)
    results = tuple(Tensor(tuple(t.shape), t.dtype) for t in results_of(node))
    return Call(node.target, _abstract(node.args), _abstract(node.kwargs), results)


def _abstract(value: Any) -> Any:
    if isinstance(value, Node):
        held = value_of(value)
        return Tensor(tuple(held.shape), held.dtype) if isinstance(held, torch.Tensor) else held
    if isinstance(value, tuple | list):
        return tuple(_abstract(item) for item in value)
    if isinstance(value, dict):
        return {key: _abstract(item) for key, item in value.items()}
    return value
