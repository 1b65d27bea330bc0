"""A searched plan is no slower than any recipe's where axes do not divide the batch, however much padding adds to it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, RecipeError, ShardingPlan, plan
from autoshard.debug.checking import Keeper, comparison
from autoshard.debug.simulated_ranks import Call
from autoshard.planner.make_plan import make_plan
from autoshard.planner.paddings.batch_padding import padded_for_fewer_samples
from autoshard.planner.problem import captured_problem
from autoshard.planner.recipe_candidates import expert_names
from autoshard.planner.request import PlanRequest
from autoshard.planner.ties import TIE
from tests.extended import extended

CLASSES = 10


class Convolutions(nn.Module):
    """Little to communicate, and much to compute for each image."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(self.second(F.relu(self.first(x))))
        return F.cross_entropy(self.out(h.mean((2, 3))), labels)


def planned(batch: int, mesh: str, options: Options | None = None) -> ShardingPlan:
    with torch.device("meta"):
        model, args = Convolutions(), (torch.empty(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long))
    return plan(model, Mesh(mesh, hardware="a100"), args, options=options or Options())


def step_time(found: ShardingPlan) -> float:
    assert found.cost is not None
    return found.cost.step_time


@pytest.mark.parametrize(("mesh", "batch"), [("dp=4,tp=2", 12), extended("dp=3,tp=5", 16), ("dp=8", 5)])
def test_no_recipe_is_faster_for_a_batch_that_axes_do_not_divide(mesh: str, batch: int) -> None:
    found = planned(batch, mesh)
    assert found.search is not None and found.search.least is not None
    candidates, by_axis = {one.name: one for one in found.search.candidates}, [{axis: "ddp"} for axis in found.mesh.names]
    assert not any("divide" in one.note for one in candidates.values())
    for recipe in (*expert_names(), *by_axis):
        try:
            expert = found.replan(recipe=recipe)
        except RecipeError:  # it needs more axes
            continue
        assert found.search.least <= step_time(expert)
        assert step_time(found) <= step_time(expert) * (1 + TIE), recipe
        if isinstance(recipe, str) and (named := candidates.get(recipe)) is not None and named.cost is not None:
            assert named.cost.step_time == pytest.approx(step_time(expert), rel=TIE), recipe


def test_the_bounds_are_of_plans_with_each_padding_and_those_that_are_proven_to_be_slower_are_not_simulated() -> None:
    found = planned(16, "dp=3,tp=5")
    assert found.search is not None and found.search.least is not None and found.search.bound is not None
    assert found.padded_axes == ("dp", "tp")
    assert 0.5 * step_time(found) < found.search.least <= step_time(found)
    assert found.search.least < found.search.bound < 1.1 * step_time(found)
    candidates = {one.name: one for one in found.search.candidates}
    assert candidates["solved, batch padded for dp"].cost is not None
    for name in ("solved, not padded", "solved, batch padded for tp", "megatron"):
        assert re.fullmatch(r"at least [\d.]+ ms: not simulated", candidates[name].note)
        assert f"\n  {name}: {candidates[name].note}\n" in str(found)


@pytest.mark.parametrize(
    ("mesh", "batch", "padded"),
    [
        ("dp=4,tp=2", 16, []),  # divided by all
        ("dp=4,tp=2", 12, [("dp", "tp")]),
        ("dp=8,tp=8", 8, []),  # a rank has one sample without padding
        ("dp=2,tp=4", 9, [("dp", "tp"), ("tp",)]),
        ("tp=8", 11, [("tp",)]),
        ("a=2,b=2,c=2", 3, [("a", "b"), ("a",)]),
        ("dp_replicate=2,dp_shard=3", 4, [()]),
        ("dp=4,cp=2", 4, []),
        ("dp=8", 1, []),
    ],
)
def test_the_batch_is_padded_where_a_rank_has_fewer_samples_by_that(
    mesh: str, batch: int, padded: list[tuple[str, ...]]
) -> None:
    with torch.device("meta"):
        model, args = Convolutions(), (torch.empty(batch, 3, 8, 8), torch.zeros(batch, dtype=torch.long))
    problem = captured_problem(PlanRequest(model, args, {}, Mesh(mesh, hardware="a100"), Options()))
    found = [tuple(problem.mesh.names[axis] for axis in one.padded_axes) for one in padded_for_fewer_samples(problem)]
    assert found == padded


def test_a_time_limit_is_for_all_paddings_together() -> None:
    found = planned(12, "dp=4,tp=2", Options(time_limit=0.0))
    assert found.search is not None
    notes = {one.name: one.note for one in found.search.candidates}
    assert notes["solved, batch padded for dp x tp"] == notes["ddp"] == "the time limit of 0.0 s was over"


@pytest.mark.parametrize(("mesh", "batch", "padded"), [("dp=2,tp=3", 4, 6), ("dp=4,tp=2", 12, 16)])
def test_a_plan_whose_batch_is_padded_by_more_than_a_quarter_has_the_gradients_of_one_device(
    mesh: str, batch: int, padded: int
) -> None:
    torch.manual_seed(0)
    keeper, model, options, on = Keeper(), Convolutions(5).double(), Options(), Mesh(mesh, hardware="h100")
    args = torch.randn(batch, 3, 48, 48, dtype=torch.float64), torch.randint(CLASSES, (batch,))
    made = make_plan(PlanRequest(model, args, {}, on, options), observers=(keeper,))
    found = comparison(keeper.graph, made, Call(model, args, {}), options)
    assert found and found.tolerance <= 1e-9 and not found.not_compared, str(found)
    assert made.plan.padded_axes == on.names, str(made.plan)
    assert any(f"a batch of {batch} is padded to {padded}" in remark.text for remark in made.plan.remarks)


@pytest.mark.parametrize("recipe", ["fsdp+megatron", "hsdp+megatron", "ddp"])
def test_a_padded_batch_is_not_split_over_an_axis_of_one_rank(recipe: str) -> None:
    model, args = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), (torch.empty(7, 16),)
    found = plan(model, Mesh("dp=2,cp=1,tp=2", hardware="h100"), args, options=Options(recipe=recipe))
    assert "dp" in found.padded_axes and "cp" not in found.padded_axes
    assert not [one for one in found.collectives if "cp" in one.axes]
