"""Find the order of the rows that a collective gathers or scatters, from the views next to it.

A row is a slice of a value along its last dim. A gather gives the rows of one rank after those of the other; if they
have to be interleaved, views and a copy do that after the gather, and undo it before a reduce-scatter.

An order of rows is a nest of loops, the outermost first: each has a size, and a stride in rows of the value before the
moves. `[B, A][R, B A][A, 1]` reads A rows, skips to the next rank's, and so on for R ranks, then the next A rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of

aten = torch.ops.aten

Move = tuple[str, tuple[int, ...]]  # "view" and a shape, or "permute" and an order
Loops = tuple[tuple[int, int], ...]  # sizes and strides


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
    """Return the elements of a row; 1 for a number, which may be a view of a 1 x 1 matrix."""
    shape = tensor_of(node).shape
    return shape[-1] if shape else 1


def rows_gathered(wait: Node, moves: Sequence[Node], ranks: int) -> Rows | None:
    """Return the order into which `moves` bring the rows of a gather, None if they split rows."""
    return gathered_order(tuple(tensor_of(wait).shape), [_described(move) for move in moves], ranks)


def rows_scattered(value: Node, moves: Sequence[Node], ranks: int) -> Rows | None:
    """Return the order in which `value` holds the rows that `moves` divide by rank, None if they split rows."""
    return scattered_order(tuple(tensor_of(value).shape), [_described(move) for move in moves], ranks)


def gathered_order(shape: tuple[int, ...], moves: Sequence[Move], ranks: int) -> Rows | None:
    """Return the order after `moves` of the rows of a value of `shape`, which has them as [ranks, before, after]."""
    return _rows(
        shape, moves, ranks, lambda rows: ((rows.before, rows.after), (ranks, rows.before * rows.after), (rows.after, 1))
    )


def scattered_order(shape: tuple[int, ...], moves: Sequence[Move], ranks: int) -> Rows | None:
    """Return the order of the rows of a value of `shape`, which `moves` bring to [ranks, before, after]."""
    return _rows(
        shape, moves, ranks, lambda rows: ((ranks, rows.after), (rows.before, ranks * rows.after), (rows.after, 1))
    )


def _rows(shape: tuple[int, ...], moves: Sequence[Move], ranks: int, loops_of: Callable[[Rows], Loops]) -> Rows | None:
    """Return the rows whose loops are those that `moves` make; None if there are none."""
    loops = _order(shape, moves)
    if loops is None:
        return None
    count = math.prod(shape[:-1])
    for before in (1, *(size for size, _ in loops)):
        if count % (before * ranks) == 0:
            rows = Rows(before, ranks, count // before // ranks)
            if _merged(loops_of(rows)) == loops:
                return rows
    return None


def _described(node: Node) -> Move:
    kind = "permute" if node.target is aten.permute.default else "view"
    given = tensor_of(node).shape if kind == "view" else [dim % len(tensor_of(node).shape) for dim in _order_of(node)]
    return kind, tuple(given)


def _order_of(node: Node) -> Sequence[int]:
    order = node.args[1]
    assert isinstance(order, list | tuple)
    return [int(dim) for dim in order if isinstance(dim, int)]


def _order(shape: tuple[int, ...], moves: Sequence[Move]) -> Loops | None:
    """Return the order of the rows of a value of `shape` after `moves`; None if they split rows or cut across loops."""
    if len(shape) < 2 or 0 in shape:
        return None
    width, sizes = shape[-1], (*shape[:-1], 1)
    loops: Loops = ((math.prod(sizes), 1),)
    for kind, given in moves:
        if kind == "permute" and given == tuple(range(len(given))):
            continue
        if kind == "permute":
            dims = _loops_of_dims(loops, sizes) if given[-1] == len(given) - 1 else None
            if dims is None:
                return None
            loops, sizes = _merged(tuple(loop for dim in given for loop in dims[dim])), tuple(sizes[dim] for dim in given)
        elif given and given[-1] % width == 0:
            sizes = (*given[:-1], given[-1] // width)
        else:
            return None
    return _merged(loops)


def _merged(loops: Loops) -> Loops:
    """Join loops that go on where the next inner one ends, and leave out those of one round, all but one."""
    found: list[tuple[int, int]] = []
    for size, stride in loops:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found) or ((1, 1),)


def _loops_of_dims(loops: Loops, sizes: tuple[int, ...]) -> list[Loops] | None:
    """Return the loops of each dim, some of which are parts of `loops`; None if a dim ends within a round of one."""
    rest, found = list(loops), list[Loops]()
    for left in sizes:
        dim: list[tuple[int, int]] = []
        while left > 1:
            size, stride = rest.pop(0)
            part = math.gcd(size, left)
            if part < min(size, left):
                return None
            if part < size:
                rest.insert(0, (size // part, stride))
            dim.append((part, stride * (size // part)))
            left //= part
        found.append(tuple(dim))
    return found
