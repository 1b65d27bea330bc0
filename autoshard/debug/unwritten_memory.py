"""Memory that nothing wrote to: it has the same content on ranks and on one device, so that only its use can differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from passes._torch import OpOverload, intercepted

aten = torch.ops.aten

_UNWRITTEN = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


def is_unwritten(node: Node) -> bool:
    """Return whether a call gives memory as it finds it."""
    return node.target in _UNWRITTEN


@contextmanager
def filled() -> Iterator[None]:
    """Fill memory that is allocated inside: with nan, which shows where it is used, and with 0 where there is none."""
    with intercepted(_filled):
        yield


def _filled(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    result = op(*args, **kwargs)
    if op not in _UNWRITTEN:
        return result
    assert isinstance(result, Tensor)
    return result.fill_(torch.nan if result.is_floating_point() or result.is_complex() else 0)
