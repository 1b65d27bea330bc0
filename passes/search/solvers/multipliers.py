"""Lagrange multipliers: the value of a second on each resource of a segment, and of a byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.search.model.factor_graph import FORWARD_END, MOMENTS, RESOURCES, FactorGraph, Floats

Weights = tuple[float, ...]  # of each resource; they sum to 1
COMPUTATION: Weights = (0.5, 0.5, *(0.0,) * (len(RESOURCES) - 2))


@dataclass(frozen=True)
class Multipliers:
    """The weights of the resources of each segment, and seconds per byte of memory at each moment.

    Only the call with most working bytes counts, and the layer with most gathered bytes: the price of a byte is shared
    among variables (`working`) and among segments (`gathered`).
    """

    segments: tuple[Weights, ...]
    bytes: tuple[float, ...] = (0.0,) * len(MOMENTS)
    working: tuple[float, ...] = ()  # per variable; none: these bytes have no price
    gathered: tuple[float, ...] = ()  # per segment

    @property
    def saved(self) -> float:
        """Return the seconds per byte that is kept from the forward for the backward."""
        return self.bytes[FORWARD_END]

    @staticmethod
    def computation(graph: FactorGraph) -> Multipliers:
        """Return multipliers under which only computation counts."""
        return Multipliers((COMPUTATION,) * len(graph.segments))


def weights_of(duals: Floats, rows: Sequence[int]) -> Weights:
    """Return the weights of one segment from the duals of its rows; if none binds, computation alone counts."""
    worth = [max(0.0, float(duals[row])) for row in rows]
    total = sum(worth)
    return tuple([one / total for one in worth]) if total else COMPUTATION
