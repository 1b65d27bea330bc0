"""Placements and layouts that are equal are one object."""

from __future__ import annotations

import copy
import pickle

from passes.ir.layout import Layout, Partial, R, Replicate, Shard


def test_equal_layouts_are_one_object_however_they_are_made() -> None:
    layout = Layout((Shard(0), R, Partial()))
    assert Layout(placements=(Shard(dim=0, outer=1), Replicate(), Partial("sum"))) is layout
    assert layout.with_on(1, Shard(1)).with_on(1, R) is layout


def test_layouts_that_differ_are_not_equal() -> None:
    assert len({Layout((one,)) for one in (R, Shard(0), Shard(1), Shard(0, 2), Partial(), Partial("max"))}) == 6


def test_what_is_pickled_or_copied_stays_one_object() -> None:
    layout = Layout((Shard(1, 3), R, Partial("max")))
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert copy.deepcopy(layout) is layout
    assert copy.copy(layout.placements[0]) is layout.placements[0]
