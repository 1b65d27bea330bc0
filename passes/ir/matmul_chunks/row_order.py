"""Find the order of the rows that a collective gathers or scatters, from the views next to it.

A row is a slice of a value along its last dim. A gather gives the rows of one rank after those of the other; if they
have to be interleaved, views and a copy do that after the gather, and undo it before a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of

aten = torch.ops.aten

_Move = tuple[str, tuple[int, ...]]  # "view" and a shape, or "permute" and an order


@dataclass(frozen=True)
class Rows:
    """Rows in the order [before, ranks, after]: each rank has `before` runs of `after` rows."""

    before: int
    ranks: int
    after: int

    @property
    def count(self) -> int:
        return self.before * self.ranks * self.after


def is_move(node: Node) -> bool:
    """Return whether the node only changes the shape of a value or the order of its elements."""
    return node.target in (aten.view.default, aten.permute.default, aten.clone.default)


def width_of(node: Node) -> int:
    return tensor_of(node).shape[-1]


def rows_gathered(wait: Node, moves: Sequence[Node], ranks: int) -> Rows | None:
    """Return the order into which `moves` bring the rows of a gather, None if they split rows."""
    shape = tuple(tensor_of(wait).shape)
    return _gathered(shape, tuple(map(_described, moves)), ranks) if len(shape) > 1 else None


def rows_scattered(value: Node, moves: Sequence[Node], ranks: int) -> Rows | None:
    """Return the order in which `value` holds the rows that `moves` divide by rank, None if they split rows."""
    shape = tuple(tensor_of(value).shape)
    return _scattered(shape, tuple(map(_described, moves)), ranks) if len(shape) > 1 else None


@lru_cache(maxsize=1 << 10)
def _gathered(shape: tuple[int, ...], moves: tuple[_Move, ...], ranks: int) -> Rows | None:
    order = _order(shape, moves)
    rows = None if order is None else _rows_in(order, ranks)
    return rows if order is not None and rows is not None and torch.equal(order[_by_rank(rows)], _identity(rows)) else None


@lru_cache(maxsize=1 << 10)
def _scattered(shape: tuple[int, ...], moves: tuple[_Move, ...], ranks: int) -> Rows | None:
    order = _order(shape, moves)
    rows = None if order is None else _rows_in(order, ranks)
    return rows if order is not None and rows is not None and torch.equal(order, _by_rank(rows)) else None


def _rows_in(order: torch.Tensor, ranks: int) -> Rows | None:
    """Return `order` as [before, ranks, after], None if it is not of that form."""
    count = len(order)
    moved = (order != torch.arange(count, device="cpu")).nonzero()
    after = int(moved[0]) if len(moved) else count // ranks
    rows = Rows(count // ranks // after, ranks, after)
    return rows if rows.count == count else None


def _described(node: Node) -> _Move:
    kind = "permute" if node.target is aten.permute.default else "view"
    given = tensor_of(node).shape if kind == "view" else [dim % len(tensor_of(node).shape) for dim in _order_of(node)]
    return kind, tuple(given)


def _order_of(node: Node) -> Sequence[int]:
    order = node.args[1]
    assert isinstance(order, list | tuple)
    return [int(dim) for dim in order if isinstance(dim, int)]


def _order(shape: tuple[int, ...], moves: tuple[_Move, ...]) -> torch.Tensor | None:
    """Return, for each row after `moves`, its place in a value of `shape`."""
    width = shape[-1]
    rows = torch.arange(math.prod(shape[:-1]), device="cpu").view(*shape[:-1], 1)
    for kind, given in moves:
        if kind == "permute":
            if given[-1] != len(given) - 1:
                return None
            rows = rows.permute(given)
        elif given and given[-1] % width == 0:
            rows = rows.reshape(*given[:-1], given[-1] // width)
        else:
            return None
    return rows.flatten()


def _identity(rows: Rows) -> torch.Tensor:
    return torch.arange(rows.count, device="cpu")


def _by_rank(rows: Rows) -> torch.Tensor:
    """Return the rows, numbered as they stand in [before, ranks, after], in the order [ranks, before, after]."""
    return torch.arange(rows.count, device="cpu").view(rows.before, rows.ranks, rows.after).transpose(0, 1).flatten()
