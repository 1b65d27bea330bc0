"""What the search takes for a move's price from below is at most the price, and is it where one step is enough."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_even
from passes.ir.mesh import Mesh
from passes.search.prices import Prices

SHAPE = 64, 128
PLACEMENTS: tuple[Placement, ...] = (R, Shard(0), Shard(1), Shard(0, 4), Shard(0, 8), Partial())


@pytest.mark.parametrize("itemsize", [4, 40_000])
@pytest.mark.parametrize("mesh", ["dp=4,tp=8", "tp=8", "dp=16,tp=8"])
def test_least_is_at_most_the_price(mesh: str, itemsize: int) -> None:
    on = Mesh(mesh, hardware="h100")
    assert on.hardware is not None
    prices = Prices(on, on.hardware)
    layouts = [Layout(placements) for placements in product(PLACEMENTS, repeat=on.ndim)]
    layouts = [layout for layout in layouts if is_even(layout, SHAPE, on)]
    weights = {"inside": 1.0, "across": 1.0}
    least = prices.least(SHAPE, itemsize, layouts, layouts, bucket=0, weights=weights)
    direct = prices.direct(layouts, layouts)
    for i, j in np.ndindex(*least.shape):
        move = prices.move(SHAPE, itemsize, layouts[i], layouts[j])
        if move is not None:
            links = move.inside + move.across
            assert least[i, j] <= links * (1 + 1e-9), f"{layouts[i].format(on)} to {layouts[j].format(on)}"
            assert not direct[i, j] or least[i, j] == pytest.approx(links)
