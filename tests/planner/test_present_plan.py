"""A what-if is answered by no slower plan than the one that is asked, where that still fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MemoryLimitError, Mesh, Options, ShardingPlan, plan
from autoshard.planner.decision import BEFORE
from tests.extended import extended


class Mlp(nn.Module):
    """Four residual layers; forward(x) with x [batch, 1024] gives a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(options: Options | None = None) -> ShardingPlan:
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(64, 1024)
    return plan(model, Mesh("dp=4,tp=2", hardware="h100"), (x,), options=options)


@pytest.fixture(scope="module")
def present() -> ShardingPlan:
    return planned()


def seconds(found: ShardingPlan) -> float:
    assert found.cost is not None
    return found.cost.step_time


@pytest.mark.parametrize("part", [1.0002, 1.1, *(extended(one) for one in (1.0, 1.001, 3.0))])
def test_a_memory_limit_above_the_peak_gives_no_slower_plan(part: float, present: ShardingPlan) -> None:
    assert present.cost is not None
    found = present.replan(memory_limit=int(part * present.cost.peak_memory))
    assert seconds(found) <= seconds(present)


def test_a_plan_that_is_kept_says_so_and_can_be_asked_again(present: ShardingPlan) -> None:
    assert present.cost is not None and present.search is not None
    limit = present.cost.peak_memory
    kept = present.replan(memory_limit=limit)
    assert kept.search is not None and kept.search.chosen == BEFORE and kept.search.memory_limit == limit
    assert (kept.cost, kept.collectives, kept.parameters) == (present.cost, present.collectives, present.parameters)
    assert kept.search.step_time == seconds(kept)
    assert f"{BEFORE}" in str(kept) and ShardingPlan.from_json(kept.to_json()) == kept
    assert "layers.0.0.weight" in str(kept.explain("layers.0.0.weight"))
    assert seconds(kept.replan(memory_limit=2 * limit)) <= seconds(kept)


def test_a_recipes_plan_is_kept_where_nothing_faster_is_found() -> None:
    fixed = planned(Options(recipe="megatron", memory_limit="80MB"))
    assert fixed.cost is not None
    found = fixed.replan(recipe="auto", memory_limit=fixed.cost.peak_memory)
    assert seconds(found) <= seconds(fixed)


def test_a_plan_is_not_kept_against_what_options_fix(present: ShardingPlan) -> None:
    layout = present.parameters["layers.0.0.weight"].layout
    assert layout is not None and "tp:S(0" in layout.format(present.mesh)
    other = present.replan(params={"layers.*.0.weight": {"tp": Shard(1)}})
    fixed = other.parameters["layers.0.0.weight"].layout
    assert fixed is not None and "tp:S(1" in fixed.format(present.mesh)


def test_a_plan_that_does_not_fit_is_not_kept(present: ShardingPlan) -> None:
    assert present.cost is not None
    with pytest.raises(MemoryLimitError, match="no plan fits in"):
        present.replan(memory_limit=present.cost.peak_memory // 2, time_limit=2.0)
