"""The memory budget of a plan: the limit, and the cost of exceeding it by recomputing values in the backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from passes.search.model.factor_graph import BACKWARD_END, FORWARD_END, Floats

GB = 1e9  # bytes


@dataclass(frozen=True)
class RecomputationStep:
    """Bytes per device that recomputing some values frees, and the seconds per byte that it takes."""

    nbytes: float
    seconds: float


RecomputationCurve = tuple[RecomputationStep, ...]  # convex: the cheapest bytes first


@dataclass(frozen=True)
class MemoryBudget:
    """The memory limit in bytes per device, and the cost of freeing what exceeds it."""

    limit: float
    recomputation: RecomputationCurve = ()

    @property
    def unit(self) -> float:
        """Return the bytes that programs count in, so that the limit is 1 or more and entries are near 1.

        HiGHS ignores entries below 1e-9: in GB, those of a model of a few KB.
        """
        return GB if self.limit >= GB else 10.0 ** math.floor(math.log10(max(self.limit, 1.0)))

    @property
    def most(self) -> float:
        """Return the bytes that a plan may take when its forward ends, if everything possible is recomputed."""
        return self.limit + sum(step.nbytes for step in self.recomputation)

    def fits(self, nbytes: Floats) -> bool:
        """Return whether a plan of that many bytes [moment] fits if everything possible is recomputed."""
        return bool(nbytes[FORWARD_END] <= self.most and nbytes[BACKWARD_END] <= self.limit)

    def seconds(self, nbytes: Floats) -> float:
        """Return the seconds of recomputation that free what exceeds the limit when the forward ends, as far as possible."""
        over, found = float(nbytes[FORWARD_END]) - self.limit, 0.0
        for step in self.recomputation:
            freed = min(max(over, 0.0), step.nbytes)
            over, found = over - freed, found + freed * step.seconds
        return found

    def worth(self, prices: Sequence[float]) -> float:
        """Return the value of the budget at `prices` [moment] in seconds a byte, with all freed that is cheaper.

        A bound on steps with bytes at these prices, minus this value, is a bound on steps within the budget (weak
        duality).
        """
        freed = sum(step.nbytes * max(0.0, prices[FORWARD_END] - step.seconds) for step in self.recomputation)
        return sum(prices) * self.limit + freed


def recomputation_curve(points: Sequence[tuple[float, float]]) -> RecomputationCurve:
    """Return the lower convex hull of (0, 0) and points of freed bytes and the seconds that they take."""
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    for nbytes, seconds in sorted(points):
        if nbytes <= hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (nbytes, seconds)):
            hull.pop()
        hull.append((nbytes, seconds))
    return tuple(RecomputationStep(b[0] - a[0], max(0.0, _slope(a, b))) for a, b in pairwise(hull))


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
