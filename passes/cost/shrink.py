"""Retry with less memory until the result fits by the simulator's measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

TRIES = 4  # attempts at most, as each is simulated; two or three mostly suffice, as each corrects the excess of the last


@dataclass(frozen=True)
class Tried(Generic[T]):
    """Result of an attempt, and the bytes to try next: less by its excess; None if it fits."""

    found: T
    less: float | None


def shrink(
    asked: float,
    attempt: Callable[[float], Tried[T] | None],
    *,
    none: float = float("-inf"),
    is_over: Callable[[], bool] = lambda: False,
    tries: int = TRIES,
) -> T | None:
    """Return the first result that fits, trying `asked` bytes and then less; else the last; None if there is none.

    `none` is an amount known to be infeasible. After an infeasible amount, the next attempt is halfway back to the last
    feasible one; no attempt goes more than halfway to an infeasible amount. After the first attempt, `is_over` stops.
    """
    some = asked
    last: T | None = None
    for number in range(tries):
        if number > 0 and is_over():
            break
        tried = attempt(asked)
        if tried is None and last is None:
            break
        if tried is None:
            none, asked = asked, (asked + some) / 2
        elif tried.less is None:
            return tried.found
        else:
            last = tried.found
            some, asked = asked, max(tried.less, (none + asked) / 2)
    return last
