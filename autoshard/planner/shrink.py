"""Ask for less memory, until what is made for it fits as the simulator measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

TRIES = 4  # at most, as each is simulated: two or three mostly do, as each corrects the last by what it was over


@dataclass(frozen=True)
class Tried(Generic[T]):
    """A result for an amount of memory, and the bytes to ask for next: less by its excess; None where it will do."""

    found: T
    less: float | None


def shrink(
    asked: float,
    attempt: Callable[[float], Tried[T] | None],
    *,
    none: float = float("-inf"),
    is_over: Callable[[], bool] = lambda: False,
) -> T | None:
    """Return the first that will do of what is made for `asked` bytes and less, else the last; None where nothing is made.

    For `none` bytes nothing can be made. An amount for which nothing is made takes the next try halfway back to the last one
    for which something was, and no try goes further than halfway to such an amount. After the first try, `is_over` ends it.
    """
    some = asked
    last: T | None = None
    for number in range(TRIES):
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
