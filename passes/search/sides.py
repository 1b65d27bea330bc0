"""The layouts on both sides of each value, and what moves between them take: of one problem, for every search in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.search.bound import Slot
from passes.search.prices import Fares, Prices
from passes.search.problem import Floats, Ints, Move, Problem

BUCKET = 25 << 20  # bytes: what gathers and reductions that hide are joined to

Arc = tuple[int, int]  # positions of source and target


@dataclass(frozen=True, eq=False)
class Tariff:
    """What moves of a value take, by source and target. Bytes are of all that the value stands for."""

    fares: Fares  # of one
    same: NDArray[np.bool_]
    moved: Floats  # by target: bytes
    held: Floats  # bytes that stay for the backward because it moved, beside what its maker counts


class Sides:
    """Layouts by position: numbers of the problem's in `sources` and `targets`."""

    def __init__(self, problem: Problem, prices: Prices) -> None:
        self.problem = problem
        self.sources: list[list[int]] = []
        self.targets: list[list[int]] = []
        self.makers: list[Slot] = []
        self.users: list[list[Slot]] = []
        for value in problem.values:
            made = problem.made(value)
            needed = [problem.needed(use) for use in value.uses]
            self.sources.append(list(dict.fromkeys(made.tolist())))
            self.targets.append(list(dict.fromkeys(np.concatenate(needed).tolist())))
            self.makers.append(_slot(value.maker.variable, made, self.sources[-1]))
            slots = [_slot(u.variable, n, self.targets[-1]) for u, n in zip(value.uses, needed, strict=True)]
            self.users.append(slots)
        self.tariffs = [self._tariff(prices, number) for number in range(len(problem.values))]

    def _tariff(self, prices: Prices, number: int) -> Tariff:
        value, problem = self.problem.values[number], self.problem
        sources, targets = ([problem.layout(n) for n in side[number]] for side in (self.sources, self.targets))
        fares = prices.fares(value.shape, value.itemsize, sources, targets, BUCKET if value.hides else 0)
        same = np.array(self.sources[number])[:, None] == np.array(self.targets[number])[None, :]
        moved = np.array([prices.nbytes(value.shape, value.itemsize, target) for target in targets]) * value.count
        held = np.zeros(same.shape)
        if value.saved:
            before = np.zeros(len(sources))
            if value.is_counted:
                before += [0.0 if s.has_partial else prices.nbytes(value.shape, value.itemsize, s) for s in sources]
            held = np.where(same, 0.0, np.maximum(0.0, moved[None, :] - before[:, None] * value.count))
        return Tariff(fares, same, moved, held)

    def move(self, number: int, arc: Arc) -> Move | None:
        """What it takes to move a value along `arc`; None where there is no way."""
        fares = self.tariffs[number].fares
        if fares.never[arc]:
            return None
        return Move(float(fares.inside[arc]), float(fares.across[arc]), float(fares.local[arc]))


def _slot(variable: int, numbers: Ints, listed: list[int]) -> Slot:
    at = {number: position for position, number in enumerate(listed)}
    return Slot(variable, np.array([at[number] for number in numbers.tolist()]), len(listed))
