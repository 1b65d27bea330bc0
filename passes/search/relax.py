"""The relaxations of a problem whose bound dual ascent finds: per segment, one weighted sum instead of the longest.

A segment lasts as long as its computation, or as the busiest link. Any weights of the three that sum to 1 give at
most that; so does a price on bytes, less what the limit allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.search.bound import NEVER, Dual, Exchange, Slot
from passes.search.prices import Prices
from passes.search.problem import Floats, Ints, Move, Problem, Value

BUCKET = 25 << 20  # bytes: what gathers and reductions that hide are joined to


@dataclass(frozen=True)
class Weights:
    """Per segment, of computation, of the link inside a node and of that across; and seconds per byte of memory."""

    segments: tuple[tuple[float, float, float], ...]
    byte: float = 0.0

    @staticmethod
    def computation(problem: Problem) -> Weights:
        return Weights(((1.0, 0.0, 0.0),) * len(problem.segments))


class Sides:
    """The layouts on both sides of each value, by position."""

    def __init__(self, problem: Problem) -> None:
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


def _slot(variable: int, numbers: Ints, listed: list[int]) -> Slot:
    at = {number: position for position, number in enumerate(listed)}
    return Slot(variable, np.array([at[number] for number in numbers.tolist()]), len(listed))


def relaxed(problem: Problem, sides: Sides, prices: Prices, weights: Weights) -> Dual:
    """The problem with these weights, ready to ascend."""
    choices = [
        variable.seconds * weights.segments[variable.segment][0] + variable.state * weights.byte
        for variable in problem.variables
    ]
    exchanges = []
    for number, value in enumerate(problem.values):
        costs = _costs(problem, sides, prices, number, value, weights)
        exchanges.append(Exchange(sides.makers[number], sides.users[number], costs))
    return Dual(choices, exchanges)


def _costs(
    problem: Problem, sides: Sides, prices: Prices, number: int, value: Value, weights: Weights
) -> Floats:
    computation, inside, across = weights.segments[value.segment]
    on_path = computation
    if value.hides:
        on_path *= problem.segments[value.segment].exposed
    by_link = {"inside": on_path + inside, "across": on_path + across}
    if value.again >= 0:  # it may be kept instead
        by_link = {"inside": 0.0, "across": 0.0}
    sources, targets = ([problem.layout(n) for n in side[number]] for side in (sides.sources, sides.targets))
    bucket = BUCKET if value.hides else 0
    found = prices.least(value.shape, value.itemsize, sources, targets, bucket=bucket, weights=by_link)
    found *= value.count
    if value.is_term:
        for position, layout in enumerate(sources):
            if layout.has_partial:
                found[position, [target != layout for target in targets]] = NEVER
    return found


def refine(dual: Dual, problem: Problem, sides: Sides, prices: Prices, worst: float) -> None:
    """Give moves that a plan shorter than `worst` may make their own price, where they had one from below."""
    struck = dual.copied()
    struck.strike(worst, 2)
    for number, value in enumerate(problem.values):
        exchange = dual.exchanges[number]
        if value.again >= 0:
            continue
        open_ = ((struck.exchanges[number].costs < struck.closed) & (exchange.used > 0)).any(0) & ~exchange.exact
        waits = problem.segments[value.segment].exposed if value.hides else 1.0
        for source, target in np.argwhere(open_).tolist():
            move = move_of(problem, sides, prices, number, (source, target))
            exact = NEVER if move is None else (move.local + waits * (move.inside + move.across)) * value.count
            exchange.raise_to(source, target, exact)


def move_of(problem: Problem, sides: Sides, prices: Prices, number: int, arc: tuple[int, int]) -> Move | None:
    """What it takes to move a value along `arc`; None where there is no way."""
    value = problem.values[number]
    source, target = problem.layout(sides.sources[number][arc[0]]), problem.layout(sides.targets[number][arc[1]])
    return prices.move(value.shape, value.itemsize, source, target, BUCKET if value.hides else 0)
