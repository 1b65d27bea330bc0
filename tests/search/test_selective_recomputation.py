"""What blocks save is the best of all that fits."""

from __future__ import annotations

import itertools
import random

import pytest

from passes.search.selective_recomputation import SelectiveRecomputation


def _random(seed: int) -> SelectiveRecomputation:
    """Return eight kinds, each made of up to two before it; a third can not be chosen, as views cannot."""
    draw = random.Random(seed)
    names = [f"v{number}" for number in range(8)]
    sources = {name: tuple(draw.sample(names[:i], min(i, draw.randint(0, 2)))) for i, name in enumerate(names)}
    nbytes = {name: draw.randint(1, 9) for name in names if draw.random() < 0.7}
    seconds = {name: float(draw.randint(0, 9)) for name in names}
    return SelectiveRecomputation(nbytes, seconds, sources, tuple(name for name in names if draw.random() < 0.5))


def _seconds(saved: SelectiveRecomputation, chosen: tuple[str, ...]) -> float:
    """Recompute what is needed and not saved, with what that is made of."""
    made: set[str] = set()
    waiting = [kind for kind in saved.needed if kind not in chosen]
    while waiting:
        kind = waiting.pop()
        if kind not in made:
            made.add(kind)
            waiting += [source for source in saved.sources[kind] if source not in chosen]
    return sum(saved.seconds[kind] for kind in made)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_that_fits_is_faster(seed: int) -> None:
    saved = _random(seed)
    for limit in (0, 5, 12, 100):
        subsets = itertools.chain.from_iterable(itertools.combinations(saved.nbytes, n) for n in range(len(saved.nbytes) + 1))
        fitting = [chosen for chosen in subsets if sum(saved.nbytes[kind] for kind in chosen) <= limit]
        best = min(_seconds(saved, chosen) for chosen in fitting)
        found = saved.within(limit)
        assert sum(saved.nbytes[kind] for kind in found) <= limit
        assert _seconds(saved, found) <= best + 0.1, (seed, limit)


def test_nothing_is_saved_for_nothing() -> None:
    saved = SelectiveRecomputation({"a": 4, "b": 4}, {"a": 1.0, "b": 0.0}, {"a": (), "b": ("a",)}, ("a", "b"))
    assert saved.within(8) == ("a",)
