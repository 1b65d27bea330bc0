"""Selections by equal masks have one length: `x[labels > 0]` and `labels[labels > 0]`, say.

Dynamo knows that of selections by the same tensor, but not of two that are computed alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.output_graph import SubgraphTracer
from torch.fx import Node, Proxy

from passes._torch.patches import replaced

_NAMES = frozenset(
    {
        "and_", "bool", "eq", "expand", "expand_as", "ge", "getitem", "gt", "inv", "invert", "isfinite", "isinf",
        "isnan", "le", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "ne", "or_", "reshape",
        "squeeze", "unsqueeze", "view", "xor"
    }
)
_FUNCTIONS = {getattr(place, name): name for place in (operator, torch) for name in _NAMES if hasattr(place, name)}


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Do as `torch.masked_select` does, by an index."""
    broadcast: Any = torch.broadcast_shapes
    shape = broadcast(x.shape, mask.shape)
    if mask.shape != shape:
        mask = mask.expand(shape)
    if x.shape != shape:
        x = x.expand(shape)
    return x[mask] if shape else x.reshape(1)[mask.reshape(1)]


@contextmanager
def equal_masks() -> Iterator[None]:
    """Let a selection by a mask that was computed before, and used as one, take the earlier mask."""
    known: list[Proxy] = []
    create: Any = SubgraphTracer.create_proxy

    def known_mask(value: Any) -> Any:
        if not isinstance(value, Proxy) or not _is_mask(value.node.meta.get("example_value")):
            return value
        here = (one for one in known if one.node.graph is value.node.graph and not one.node._erased)
        equal = (one for one in here if _is_same(one.node, value.node))
        found = next(equal, None)
        if found is None:
            known.append(value)
        return value if found is None else found

    def created(tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> Any:
        if target is operator.getitem and len(args) == 2:
            index = args[1]
            args = (args[0], tuple(map(known_mask, index)) if type(index) is tuple else known_mask(index))
        return create(tracer, kind, target, args, kwargs, *others, **more)

    with replaced(SubgraphTracer, "create_proxy", created):
        yield


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal: one value, or the same comparison of equal values, none of which was written to."""
    if isinstance(one, Node) and isinstance(other, Node):
        values = [node.meta.get("example_value") for node in (one, other)]
        if any(not isinstance(value, Tensor) or value._version != 0 for value in values):
            return False
        if one is other:
            return True
        name = one.target if one.op == "call_method" else _FUNCTIONS.get(one.target)
        if name not in _NAMES or (one.op, one.target) != (other.op, other.target):
            return False
        return _is_same(one.args, other.args) and _is_same(dict(one.kwargs), dict(other.kwargs))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and not isinstance(one, Node) and bool(one == other)
