"""The steps that a reshard is made of, as nodes: each changes the placement of one or more axes.

On one device they are identities, as `reshard` is; their layouts say what moves. `localize` turns them
into functional collectives on per-device tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node


def all_gather(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """`S -> R` on all of `axes`, one collective over their product."""
    return value


def reduce_scatter(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """`P -> S` on all of `axes`, one collective over their product."""
    return value


def all_reduce(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """`P -> R` on all of `axes`, one collective over their product."""
    return value


def all_to_all(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """`S -> S` of another digit, on one axis."""
    return value


def take_part(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """`R -> S` on `axes`: every rank keeps its part; nothing is sent."""
    return value


def take_term(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """`R -> P` on `axes`: of a sum or product the first rank keeps the value and the others hold zero or one; of a
    maximum, minimum or mean all keep it. Nothing is sent."""
    return value


STEPS: tuple[Callable[..., torch.Tensor], ...] = (
    all_gather,
    reduce_scatter,
    all_reduce,
    all_to_all,
    take_part,
    take_term,
)
COMMUNICATING = STEPS[:4]


def is_step(node: Node) -> bool:
    """Whether the node is one step of a lowered reshard."""
    return node.op == "call_function" and node.target in STEPS


def is_collective(node: Node) -> bool:
    """Whether the node is a step that sends data."""
    return node.op == "call_function" and node.target in COMMUNICATING


def step_axes(node: Node) -> tuple[str, ...]:
    """The axes that a step moves."""
    axes = node.args[1]
    assert isinstance(axes, tuple | list)
    return tuple(str(axis) for axis in axes)


def step_kind(node: Node) -> str:
    """`"all_gather"`, `"reduce_scatter"`, ..."""
    assert callable(node.target)
    return node.target.__name__
