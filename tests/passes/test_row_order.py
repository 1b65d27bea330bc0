"""The order of gathered and scattered rows, found from views, is that of row numbers that are moved by them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from passes.ir.matmul_chunks.row_order import Move, Rows, gathered_order, scattered_order


def moved(shape: tuple[int, ...], moves: list[Move]) -> Tensor:
    """Move the elements of a value, each of which has the number of its row."""
    rows = torch.arange(math.prod(shape[:-1])).repeat_interleave(shape[-1]).view(shape)
    for kind, given in moves:
        rows = rows.permute(given) if kind == "permute" else rows.reshape(given)
    return rows.flatten()[:: shape[-1]]


def by_rank(rows: Rows) -> Tensor:
    """Return the numbers of rows that stand as [before, ranks, after], one rank's after another's."""
    return torch.arange(rows.count).view(rows.before, rows.ranks, rows.after).transpose(0, 1).flatten()


def orders(count: int, ranks: int) -> list[Rows]:
    return [Rows(before, ranks, count // ranks // before) for before in range(1, count + 1) if count % (before * ranks) == 0]


def random_moves(chance: random.Random, shape: tuple[int, ...]) -> list[Move]:
    """Draw views and permutes that keep rows whole; each view splits or joins dims."""
    moves, sizes = list[Move](), list(shape)
    for _ in range(chance.randrange(5)):
        if chance.random() < 0.5:
            order = [*chance.sample(range(len(sizes) - 1), len(sizes) - 1), len(sizes) - 1]
            moves.append(("permute", tuple(order)))
            sizes = [sizes[dim] for dim in order]
        else:
            left, sizes = math.prod(sizes[:-1]), [sizes[-1]]
            while left > 1:
                size = chance.choice([one for one in range(2, left + 1) if left % one == 0])
                sizes.insert(chance.randrange(len(sizes)), size)
                left //= size
            moves.append(("view", tuple(sizes)))
    return moves


@pytest.mark.parametrize("seed", range(60))
def test_an_order_is_that_of_numbered_rows(seed: int) -> None:
    chance = random.Random(seed)
    shape, ranks = (*chance.choices([1, 2, 3, 4, 6, 8], k=chance.randrange(1, 4)), 5), chance.choice([1, 2, 3, 4])
    moves = random_moves(chance, shape)
    order, count = moved(shape, moves), math.prod(shape[:-1])
    gathered = [rows for rows in orders(count, ranks) if torch.equal(order[by_rank(rows)], torch.arange(count))]
    scattered = [rows for rows in orders(count, ranks) if torch.equal(order, by_rank(rows))]
    for found, matching in ((gathered_order, gathered), (scattered_order, scattered)):
        rows = found(shape, moves, ranks)
        assert rows in matching if rows is not None else not matching, (shape, moves, ranks)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([("view", (4, 3, 8, 5)), ("permute", (1, 0, 2, 3))], Rows(3, 4, 8)),
        ([("view", (4, 24, 5)), ("permute", (1, 0, 2))], Rows(24, 4, 1)),
        ([], Rows(1, 4, 24)),
        ([("view", (24, 20))], Rows(1, 4, 24)),
        ([("view", (32, 15)), ("permute", (1, 0))], None),
        ([("view", (3, 32, 5)), ("permute", (1, 0, 2))], None),
    ],
)
def test_rows_of_four_ranks_are_found_or_refused(moves: list[Move], expected: Rows | None) -> None:
    assert gathered_order((96, 5), moves, 4) == expected


def test_a_hundred_million_rows_take_no_memory() -> None:
    moves: list[Move] = [("view", (2, 4_000_000, 32, 64)), ("permute", (1, 0, 2, 3)), ("view", (4_000_000, 64, 64))]
    assert gathered_order((256_000_000, 64), moves, 2) == Rows(4_000_000, 2, 32)
