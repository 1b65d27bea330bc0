"""The relaxations of a problem whose bound dual ascent finds: per segment, one weighted sum instead of the longest.

A segment lasts as long as its computation, or as the busiest link. Any weights of the three that sum to 1 give at
most that; so does a price on bytes, less what the limit allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.search.bound import NEVER, Dual, Exchange, Slot
from passes.search.prices import Prices
from passes.search.problem import Busy, Floats, Ints, Move, Problem

BUCKET = 25 << 20  # bytes: what gathers and reductions that hide are joined to


@dataclass(frozen=True)
class Weights:
    """Per segment, of computation, of the link inside a node and of that across; and seconds per byte of memory.

    Of what one call holds only the most counts, and of what one layer gathers: the price of a byte is shared out among
    calls (`work`, per variable), and among segments (`buffers`).
    """

    segments: tuple[Busy, ...]
    byte: float = 0.0
    work: tuple[float, ...] = ()  # none: calls are not priced
    buffers: tuple[float, ...] = ()

    def between(self, other: Weights) -> Weights:
        """Halfway to `other`."""
        segments = [
            ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2, (a[2] + b[2]) / 2)
            for a, b in zip(self.segments, other.segments, strict=True)
        ]
        byte = math.sqrt(self.byte * other.byte) or (self.byte + other.byte) / 2  # they differ by orders of magnitude
        shares = (_shared(byte, a, b) for a, b in ((self.work, other.work), (self.buffers, other.buffers)))
        return Weights(tuple(segments), byte, *shares)

    @staticmethod
    def computation(problem: Problem) -> Weights:
        return Weights(((1.0, 0.0, 0.0),) * len(problem.segments))


def _shared(byte: float, one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    """The price of a byte, shared out halfway between two ways to do so."""
    if not one or not other:
        one = other = one or other
    parts = [a + b for a, b in zip(one, other, strict=True)]
    total = sum(parts)
    return tuple(byte * part / total for part in parts) if total else ()


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


@dataclass(frozen=True, eq=False)
class _Tariff:
    """What moves of a value take, by source and target: seconds on each link."""

    inside: Floats
    across: Floats
    local: Floats
    held: Floats  # bytes that stay if it moved
    gathered: Floats  # bytes of one layer's parameters while it uses them
    again: bool  # or it moves once more in the backward
    kept: Floats | None  # bytes that stay if it is kept from the forward instead, where it can be
    never: NDArray[np.bool_]

    def cost(self, weights: Busy, byte: float, buffer: float, waits: float, later: Busy) -> Floats:
        """Of moves that `waits` of their time is in front of computation; `later` are weights of moving again."""
        computation, inside, across = weights
        seconds = (computation * waits + inside) * self.inside + (computation * waits + across) * self.across
        seconds += computation * self.local + buffer * self.gathered
        if self.kept is not None:
            seconds = np.minimum(seconds, byte * self.kept)
        held = byte * self.held
        if self.again:
            repeated = later[1] * self.inside + later[2] * self.across
            held = np.minimum(held, repeated)
        found: Floats = seconds + held
        return np.where(self.never, NEVER, found)


class Relaxation:
    """A problem under weights that can change, and its dual."""

    def __init__(self, problem: Problem, sides: Sides, prices: Prices) -> None:
        self.problem, self.sides, self.prices = problem, sides, prices
        self.weights = Weights.computation(problem)
        self.tariffs = [self._tariff(number) for number in range(len(problem.values))]
        exchanges = [
            Exchange(sides.makers[number], sides.users[number], self._cost(number, self.weights))
            for number in range(len(problem.values))
        ]
        self.dual = Dual([self._choices(number, self.weights) for number in range(len(problem.variables))], exchanges)

    def _choices(self, number: int, weights: Weights) -> Floats:
        variable = self.problem.variables[number]
        found: Floats = variable.seconds * weights.segments[variable.segment][0] + variable.state * weights.byte
        return found + variable.held * weights.work[number] if weights.work else found

    def _cost(self, number: int, weights: Weights) -> Floats:
        value = self.problem.values[number]
        waits = self.problem.segments[value.segment].exposed if value.hides else 1.0
        computation, inside, across = weights.segments[value.backward]
        stall = computation * self.problem.segments[value.backward].exposed
        later = computation, inside + stall, across + stall
        buffer = weights.buffers[value.segment] if weights.buffers else 0.0
        return self.tariffs[number].cost(weights.segments[value.segment], weights.byte, buffer, waits, later)

    def _tariff(self, number: int) -> _Tariff:
        value, problem = self.problem.values[number], self.problem
        sources, targets = ([problem.layout(n) for n in side[number]] for side in (self.sides.sources, self.sides.targets))
        bucket = BUCKET if value.hides else 0
        fares = self.prices.fares(value.shape, value.itemsize, sources, targets, bucket)
        same = np.array(self.sides.sources[number])[:, None] == np.array(self.sides.targets[number])[None, :]
        moved = np.array([self.prices.nbytes(value.shape, value.itemsize, t) for t in targets]) * value.count
        nbytes = np.where(same, 0.0, moved[None, :])
        before = np.zeros(len(sources))
        if value.is_counted:
            before += [0.0 if s.has_partial else self.prices.nbytes(value.shape, value.itemsize, s) for s in sources]
        more = np.where(same, 0.0, np.maximum(0.0, moved[None, :] - before[:, None] * value.count))
        never = fares.never
        if value.is_term:
            never = never | (np.array([source.has_partial for source in sources])[:, None] & ~same)
        return _Tariff(
            fares.inside * value.count,
            fares.across * value.count,
            fares.local * value.count,
            more if value.saved else np.zeros(same.shape),
            nbytes / problem.segments[value.segment].layers if value.is_parameter else np.zeros(same.shape),
            value.backward >= 0,
            nbytes if value.again >= 0 else None,
            never,
        )

    def reweigh(self, weights: Weights) -> None:
        """Change the weights; the dual goes on from where it is."""
        dual = self.dual
        for number in range(len(self.problem.variables)):
            change = self._choices(number, weights) - self._choices(number, self.weights)
            costs = dual.choices[number] + change
            low = float(costs.min())
            dual.choices[number] = costs - low
            dual.bound += low
        for number, exchange in enumerate(dual.exchanges):
            exchange.reprice(self._cost(number, weights))
            dual.bound += exchange.lift()
        self.weights = weights


def held_by(problem: Problem, sides: Sides, prices: Prices, number: int, arc: tuple[int, int]) -> float:
    """Bytes that are kept for the backward because a value moved along `arc`, beside what its maker counts."""
    value = problem.values[number]
    source, target = problem.layout(sides.sources[number][arc[0]]), problem.layout(sides.targets[number][arc[1]])
    if not value.saved or source == target:
        return 0.0
    before = 0.0
    if value.is_counted and not source.has_partial:
        before = prices.nbytes(value.shape, value.itemsize, source)
    return max(0.0, prices.nbytes(value.shape, value.itemsize, target) - before) * value.count


def move_of(problem: Problem, sides: Sides, prices: Prices, number: int, arc: tuple[int, int]) -> Move | None:
    """What it takes to move a value along `arc`; None where there is no way."""
    value = problem.values[number]
    source, target = problem.layout(sides.sources[number][arc[0]]), problem.layout(sides.targets[number][arc[1]])
    return prices.move(value.shape, value.itemsize, source, target, BUCKET if value.hides else 0)
