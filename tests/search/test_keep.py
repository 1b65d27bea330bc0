"""What blocks keep is the best of all choices that fit."""

from __future__ import annotations

import itertools
import random

import pytest

from passes.search.keep import Keep


def _random(seed: int) -> Keep:
    """Eight kinds, each made of up to two before it; a third can not be kept, as views cannot."""
    draw = random.Random(seed)
    names = [f"v{number}" for number in range(8)]
    sources = {name: tuple(draw.sample(names[:i], min(i, draw.randint(0, 2)))) for i, name in enumerate(names)}
    nbytes = {name: draw.randint(1, 9) for name in names if draw.random() < 0.7}
    seconds = {name: float(draw.randint(0, 9)) for name in names}
    return Keep(nbytes, seconds, sources, tuple(name for name in names if draw.random() < 0.5))


def _seconds(keep: Keep, kept: tuple[str, ...]) -> float:
    """To make again what is needed and not kept, with what that is made of."""
    made: set[str] = set()
    waiting = [kind for kind in keep.needed if kind not in kept]
    while waiting:
        kind = waiting.pop()
        if kind not in made:
            made.add(kind)
            waiting += [source for source in keep.sources[kind] if source not in kept]
    return sum(keep.seconds[kind] for kind in made)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_that_fits_is_faster(seed: int) -> None:
    keep = _random(seed)
    for limit in (0, 5, 12, 100):
        subsets = itertools.chain.from_iterable(itertools.combinations(keep.nbytes, n) for n in range(len(keep.nbytes) + 1))
        fitting = [kept for kept in subsets if sum(keep.nbytes[kind] for kind in kept) <= limit]
        best = min(_seconds(keep, kept) for kept in fitting)
        found = keep.within(limit)
        assert sum(keep.nbytes[kind] for kind in found) <= limit
        assert _seconds(keep, found) <= best + 0.1, (seed, limit)


def test_nothing_is_kept_for_nothing() -> None:
    keep = Keep({"a": 4, "b": 4}, {"a": 1.0, "b": 0.0}, {"a": (), "b": ("a",)}, ("a", "b"))
    assert keep.within(8) == ("a",)
