"""Lagrange multipliers: the value of a second on each resource of a segment, and of a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from passes.search.model.factor_graph import FactorGraph, Floats

Weights = tuple[float, float, float]  # of computation, of links inside a node and of links across; they sum to 1


@dataclass(frozen=True)
class Multipliers:
    """The weights of the resources of each segment, and seconds per byte of memory.

    Only the call with most working bytes counts, and the layer with most gathered bytes: the price of a byte is shared
    among variables (`working`) and among segments (`gathered`).
    """

    segments: tuple[Weights, ...]
    byte: float = 0.0
    working: tuple[float, ...] = ()  # per variable; none: these bytes have no price
    gathered: tuple[float, ...] = ()  # per segment

    @staticmethod
    def computation(graph: FactorGraph) -> Multipliers:
        """Return multipliers under which only computation counts."""
        return Multipliers(((1.0, 0.0, 0.0),) * len(graph.segments))

    def between(self, other: Multipliers) -> Multipliers:
        """Return multipliers halfway to `other`."""
        segments = [
            ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2, (a[2] + b[2]) / 2)
            for a, b in zip(self.segments, other.segments, strict=True)
        ]
        byte = math.sqrt(self.byte * other.byte) or (self.byte + other.byte) / 2  # they differ by orders of magnitude
        pairs = ((self.working, other.working), (self.gathered, other.gathered))
        return Multipliers(tuple(segments), byte, *(_shared(byte, one, two) for one, two in pairs))


def weights_of(duals: Floats, rows: Sequence[int]) -> Weights:
    """Return the weights of one segment from the duals of its rows; if none binds, computation alone counts."""
    worth = [max(0.0, float(duals[row])) for row in rows]
    total = sum(worth)
    return (worth[0] / total, worth[1] / total, worth[2] / total) if total else (1.0, 0.0, 0.0)


def _shared(byte: float, one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    """Share the price of a byte halfway between two ways to divide it."""
    if not one or not other:
        one = other = one or other
    parts = [a + b for a, b in zip(one, other, strict=True)]
    total = sum(parts)
    return tuple(byte * part / total for part in parts) if total else ()
