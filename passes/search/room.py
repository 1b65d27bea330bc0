"""The memory that a plan has, and what more of it costs: computing values again rather than keeping them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Step:
    """What computing again frees of a device's memory, and what that takes."""

    nbytes: float
    seconds: float  # per byte


Relief = tuple[Step, ...]  # the cheapest bytes first


@dataclass(frozen=True)
class Room:
    """Bytes of a device, and how more than these can be freed."""

    limit: float
    relief: Relief = ()

    @property
    def most(self) -> float:
        """Bytes that a plan may take before anything is computed again."""
        return self.limit + sum(step.nbytes for step in self.relief)

    def fits(self, memory: float) -> bool:
        return memory <= self.most

    def seconds(self, memory: float) -> float:
        """To free what `memory` is over the limit, as far as that goes."""
        over, found = memory - self.limit, 0.0
        for step in self.relief:
            freed = min(max(over, 0.0), step.nbytes)
            over, found = over - freed, found + freed * step.seconds
        return found

    def worth(self, byte: float, base: float) -> float:
        """Seconds that all bytes but `base` are worth at so many a byte, where those are freed that are worth it: with a
        plan's bytes at that price, no plan is better than its own seconds less these."""
        freed = sum(step.nbytes * max(0.0, byte - step.seconds) for step in self.relief)
        return byte * (self.limit - base) + freed


def relief_of(points: Sequence[tuple[float, float]]) -> Relief:
    """From bytes that are freed and the seconds that this takes: the lower convex hull of these and (0, 0)."""
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    for nbytes, seconds in sorted(points):
        if nbytes <= hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (nbytes, seconds)):
            hull.pop()
        hull.append((nbytes, seconds))
    return tuple(Step(b[0] - a[0], max(0.0, _slope(a, b))) for a, b in pairwise(hull))


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
