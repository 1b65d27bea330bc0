"""The search costs a transition as the steps that the reshard is lowered to."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_storable
from passes.ir.mesh import Mesh
from passes.search.model.unit_costs import Hiding, UnitCosts

SHAPE = 64, 120  # the second dim is padded on some axes
PLACEMENTS: tuple[Placement, ...] = (R, Shard(0), Shard(1), Shard(0, 4), Shard(0, 8), Partial())


@pytest.mark.slow
@pytest.mark.parametrize("itemsize", [4, 40_000])
@pytest.mark.parametrize("mesh", ["dp=4,tp=8", "tp=8", "dp=16,tp=8", "dp=2,cp=2,tp=2"])
def test_transitions_cost_what_the_emitted_steps_cost(mesh: str, itemsize: int) -> None:
    on = Mesh(mesh, hardware="h100")
    unit_costs = UnitCosts.of(on)
    layouts = [Layout(placements) for placements in product(PLACEMENTS, repeat=on.ndim)]
    layouts = [layout for layout in layouts if is_storable(layout, SHAPE, on)]
    costs = unit_costs.transition_costs(SHAPE, itemsize, layouts, layouts)
    for i, j in list(np.ndindex(*costs.local.shape))[:: max(1, costs.local.size // 500)]:
        fresh = UnitCosts.of(on)  # knows of no transition that is like it
        alone = fresh.transition_costs(SHAPE, itemsize, [layouts[i]], [layouts[j]])
        one, found = (
            [float(cost[at]) for cost in (*of.on_links, of.local, of.impossible)]
            for of, at in ((alone, (0, 0)), (costs, (i, j)))
        )
        assert found == pytest.approx(one), f"{layouts[i].format(on)} to {layouts[j].format(on)}"


def test_routes_of_few_elements_are_not_those_of_many() -> None:
    """A number is reduced on one axis after another, which pads it less; a matrix in one message."""
    on = Mesh("dp=16,tp=8", hardware="h100")
    unit_costs, partial, whole = UnitCosts.of(on), Layout((Partial(), Partial())), Layout((R, R))
    unit_costs.transition_costs((), 4, [partial], [whole])
    costs = unit_costs.transition_costs((4096, 4096), 4, [partial], [whole])
    inside, across = costs.on_links
    assert inside == 0.0 < across


def test_without_overlap_kernels_wait_for_all_messages_and_are_spared_nothing() -> None:
    on, links = Mesh("dp=16,tp=8", hardware="h100"), np.ones((2, 1, 1))
    apart, beside = UnitCosts.of(on, Hiding(0, 0, overlaps=False, in_chunks=False)), UnitCosts.of(on)
    for costs, waits in ((apart, 1.0), (beside, 0.25)):
        found, slowed = costs.split(links, 0.25)
        assert (found == waits).all() and (slowed == costs.slowed(links * (1 - waits))).all()
    assert not apart.spared(links).any() and (beside.spared(links) > 0).all()
