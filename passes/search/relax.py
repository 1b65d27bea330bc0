"""The relaxations of a problem whose bound dual ascent finds: per segment, one weighted sum instead of the longest.

A segment lasts as long as its computation, or as the busiest link. Any weights of the three that sum to 1 give at
most that; so does a price on bytes, less what the limit allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.search.bound import NEVER, Dual, Exchange
from passes.search.problem import Busy, Floats, Problem
from passes.search.sides import Sides


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


@dataclass(frozen=True, eq=False)
class _Term:
    """What moves of a value add to a plan, by source and target: seconds on each link, and bytes."""

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

    def __init__(self, sides: Sides) -> None:
        self.problem, self.sides = sides.problem, sides
        problem = self.problem
        self.weights = Weights.computation(problem)
        self.terms = [self._term(number) for number in range(len(problem.values))]
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
        return self.terms[number].cost(weights.segments[value.segment], weights.byte, buffer, waits, later)

    def _term(self, number: int) -> _Term:
        value, problem, tariff = self.problem.values[number], self.problem, self.sides.tariffs[number]
        fares, same = tariff.fares, tariff.same
        nbytes = np.where(same, 0.0, tariff.moved[None, :])
        never = fares.never
        if value.is_term:
            sources = [problem.layout(n).has_partial for n in self.sides.sources[number]]
            never = never | (np.array(sources)[:, None] & ~same)
        return _Term(
            fares.inside * value.count,
            fares.across * value.count,
            fares.local * value.count,
            tariff.held,
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
