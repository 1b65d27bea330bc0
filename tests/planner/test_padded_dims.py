"""A recipe among the candidates of a search is what it is when it is given by name, also where axes do not divide widths."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import MemoryLimitError, Mesh, Options, RecipeError, ShardingPlan, plan
from autoshard.config.progress import Progress
from autoshard.planner.candidates import Beside
from autoshard.planner.paddings import variants
from autoshard.planner.recipe_candidates import expert_names
from autoshard.planner.standings import SearchTask
from autoshard.planner.ties import TIE
from tests.extended import extended

Case = tuple[tuple[int, ...], int, str, str]  # widths, batch, mesh, hardware

# Megatron's widths are padded on an axis for data; no axis divides widths or the batch; a rank stores padded parts.
CASES: list[Case] = [
    ((1025, 5461, 5461, 1025), 1001, "dp=7", "b200"),
    ((1000, 4000, 1000), 1024, "tp=3", "h100"),
    ((2049, 6001, 2049), 513, "dp=2,tp=5", "b200"),
    ((2048, 16384, 2048), 64, "dp=2,tp=3", "h100"),
]


CHUNKS = 0.05  # that the step is shorter by with messages in chunks, which are tried where they could make a plan the best


class Mlp(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def planned(case: Case, recipe: str = "auto") -> ShardingPlan:
    widths, batch, mesh, hardware = case
    with torch.device("meta"):
        model, args = Mlp(widths), (torch.empty(batch, widths[0]),)
    return plan(model, Mesh(mesh, hardware=hardware), args, options=Options(recipe=recipe))


def step_time(found: ShardingPlan) -> float:
    assert found.cost is not None
    return found.cost.step_time


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_recipe_is_faster_and_no_plan_than_what_is_proven(case: Case) -> None:
    found = planned(case)
    assert found.search is not None and found.search.least is not None
    candidates = {one.name: one for one in found.search.candidates}
    assert any(name.startswith("solved") for name in candidates)
    for recipe in expert_names():
        try:
            expert = found.replan(recipe=recipe)
        except RecipeError:  # it needs more axes
            continue
        assert found.search.least <= step_time(expert), recipe
        assert step_time(found) <= step_time(expert) * (1 + TIE), recipe
        if (cost := candidates[recipe].cost) is not None:
            assert cost.step_time == pytest.approx(step_time(expert), rel=CHUNKS), recipe


@pytest.mark.parametrize("names", [("dp=4", "x=4"), extended(("dp=2,tp=3", "y=2,x=3"))], ids=str)
def test_widths_that_axes_do_not_divide_are_planned_alike_whatever_axes_are_named(names: tuple[str, str]) -> None:
    one, other = (step_time(planned(((1000, 3001, 1500, 777), 1000, mesh, "h100"))) for mesh in names)
    assert one == pytest.approx(other, rel=TIE)


@pytest.mark.parametrize(
    ("widths", "batch", "names"),
    [
        ((1000, 7777, 333, 4096, 10), 50, ("dp=6", "a=6")),
        ((64, 64, 64, 64, 64, 64), 50000, ("dp=6", "a=6")),
        extended((1000, 7777, 333, 4096, 10), 50, ("dp=2,fsdp=3", "a=2,tp=3")),
    ],
    ids=str,
)
def test_batch_and_widths_are_padded_each_alone_and_together_whatever_axes_are_named(
    widths: tuple[int, ...], batch: int, names: tuple[str, str]
) -> None:
    """An axis that is named for data has the batch padded by default, another one the widths: neither is best everywhere."""
    found = [planned((widths, batch, mesh, "h100")) for mesh in names]
    assert step_time(found[0]) == pytest.approx(step_time(found[1]), rel=TIE)
    for one in found:
        assert one.search is not None
        solved = [other.cost.step_time for other in one.search.candidates if other.name.startswith("solved") and other.cost]
        assert min(solved) <= step_time(one) * (1 + TIE)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (((1000, 3001, 1500, 777), 1000, "dp=4,tp=2", "a100"), float("inf")),
        (((333, 777, 333, 777), 64, "dp=2,tp=2", "h100"), 1.05),  # it is 6 % slower: prices with other paddings may be better
    ],
    ids=str,
)
def test_how_much_slower_the_best_is_than_priced_is_known_to_searches_with_other_paddings(
    case: Case, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, told = list[Beside](), list[tuple[float, float]]()

    def searched(variant: variants.Variant, task: SearchTask, progress: Progress) -> Beside:
        told.append((task.best_elsewhere, task.underpriced_elsewhere))
        best.append(usual(variant, task, progress))
        return best[-1]

    usual = variants._searched
    monkeypatch.setattr(variants, "_searched", searched)
    planned(case)
    choice = best[0].choice
    assert choice is not None and choice.search.step_time is not None and choice.search.objective is not None
    slower = choice.search.step_time / choice.search.objective
    assert told[:2] == [(float("inf"), 1.0), (choice.search.step_time, min(slower, most))] and slower > 1.02


def test_a_plan_says_for_which_axes_dims_are_padded_and_is_followed_from_its_file(tmp_path: Path) -> None:
    """By the names of the axes, nothing is padded: the layouts of this plan would not be valid."""
    model, args = Mlp((1000, 3001, 1500, 777)).double(), (torch.randn(1000, 1000, dtype=torch.float64),)
    found = plan(model, Mesh("dp=4", hardware="h100"), args)
    assert found.compute_axes == ("dp",) and found.recipes == (None,)
    found.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == found
    assert autoshard.check(model, "dp=4", args, plan=loaded)


@pytest.mark.parametrize(("mesh", "batch", "dims"), [("dp=3", (), ("dp",)), ("a=3", ("a",), ())], ids=str)
def test_a_plan_with_the_batch_or_dims_padded_against_the_names_of_its_axes_computes_what_one_device_does(
    mesh: str, batch: tuple[str, ...], dims: tuple[str, ...], tmp_path: Path
) -> None:
    widths, samples = ((300, 2222, 100, 1100, 10), 50) if dims else ((16, 50, 5), 5000)
    model, args = Mlp(widths).double(), (torch.randn(samples, widths[0], dtype=torch.float64),)
    found = plan(model, Mesh(mesh, hardware="h100"), args)
    assert (found.padded_axes, found.compute_axes) == (batch, dims)
    found.save(tmp_path / "plan.json")
    assert autoshard.check(model, mesh, args, plan=ShardingPlan.load(tmp_path / "plan.json"))


def test_a_recipe_that_was_chosen_is_the_plan_of_that_name(tmp_path: Path) -> None:
    case = (512, 2048, 512), 7, "dp=3", "h100"
    found = planned(case)
    assert found.search is not None and found.search.chosen == "megatron"
    expert = planned(case, "megatron")
    assert step_time(found) == step_time(expert) and found.parameters == expert.parameters
    assert any("padded to" in remark.text for remark in found.remarks)
    found.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == found


def test_such_a_plan_computes_what_one_device_does() -> None:
    """A program is made for it with widths padded as the recipe asks, not as the names of the axes do."""
    model, args = Mlp((512, 2048, 512)).double(), (torch.randn(7, 512, dtype=torch.float64),)
    found = plan(model, Mesh("dp=3", hardware="h100"), args)
    assert found.search is not None and found.search.chosen == "megatron"
    assert autoshard.check(model, "dp=3", args, plan=found)


def test_a_limit_in_which_nothing_fits_is_told_the_smallest_of_all_paddings() -> None:
    with torch.device("meta"):
        model, args = Mlp((1025, 5461, 1025)), (torch.empty(1001, 1025),)
    on = Mesh("dp=7", hardware="b200")
    with pytest.raises(MemoryLimitError) as raised:
        plan(model, on, args, options=Options(memory_limit=10 << 20))
    said = re.search(r"Give memory_limit=(\d+),", str(raised.value))
    assert said is not None
    with pytest.raises(MemoryLimitError):
        plan(model, on, args, options=Options(memory_limit=int(0.9 * int(said[1]))))
    found = plan(model, on, args, options=Options(memory_limit=int(said[1])))
    assert found.cost is not None and found.cost.peak_memory <= int(said[1])
