"""Calls that draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from passes._torch import OpOverload


def draws(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers.

    PyTorch's tag says that an op can. Attention and dropout do not where their probability is 0.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = {argument.name for argument in op._schema.arguments}
    for name in ("dropout_p", "dropout", "training"):
        if name in names:
            return bool(_argument(op, args, kwargs, name))
    if {"p", "train"} <= names:  # of native_dropout, None means that it is in training
        return bool(_argument(op, args, kwargs, "p")) and _argument(op, args, kwargs, "train") is not False
    return True


def _argument(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    place, argument = next((i, one) for i, one in enumerate(op._schema.arguments) if one.name == name)
    if place < len(args) and not argument.kwarg_only:
        return args[place]
    return kwargs.get(name, argument.default_value)


def is_random(node: Node) -> bool:
    """Return whether a call of a graph draws random numbers."""
    return isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)
