"""What the search takes for the price of a move is the price of the steps that it is lowered to."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_storable
from passes.ir.mesh import Mesh
from passes.search.prices import Prices

SHAPE = 64, 120  # the second dim is padded on some axes
PLACEMENTS: tuple[Placement, ...] = (R, Shard(0), Shard(1), Shard(0, 4), Shard(0, 8), Partial())


@pytest.mark.parametrize("itemsize", [4, 40_000])
@pytest.mark.parametrize("mesh", ["dp=4,tp=8", "tp=8", "dp=16,tp=8", "dp=2,cp=2,tp=2"])
def test_fares_are_the_prices_of_the_steps_that_are_emitted(mesh: str, itemsize: int) -> None:
    on = Mesh(mesh, hardware="h100")
    assert on.hardware is not None
    prices = Prices(on, on.hardware)
    layouts = [Layout(placements) for placements in product(PLACEMENTS, repeat=on.ndim)]
    layouts = [layout for layout in layouts if is_storable(layout, SHAPE, on)]
    fares = prices.fares(SHAPE, itemsize, layouts, layouts)
    for i, j in list(np.ndindex(*fares.inside.shape))[:: max(1, fares.inside.size // 500)]:
        fresh = Prices(on, on.hardware)  # knows of no move that is like it
        alone = fresh.fares(SHAPE, itemsize, [layouts[i]], [layouts[j]])
        one, found = (
            [float(fare[at]) for fare in (of.inside, of.across, of.local, of.never)]
            for of, at in ((alone, (0, 0)), (fares, (i, j)))
        )
        assert found == pytest.approx(one), f"{layouts[i].format(on)} to {layouts[j].format(on)}"
