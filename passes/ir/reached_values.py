"""Follow values through a graph, each once, however many paths lead to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def all_followed(start: T, following: Callable[[T], Iterable[T] | None]) -> bool:
    """Return whether `following` gives what comes after every value that is reached from `start`; for one that breaks the
    condition it returns None."""
    queue, seen = [start], {start}
    while queue:
        found = following(queue.pop())
        if found is None:
            return False
        unseen = [one for one in dict.fromkeys(found) if one not in seen]
        queue += unseen
        seen.update(unseen)
    return True
