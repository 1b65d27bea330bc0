"""The layers of a list are one segment, alike or not: a layer's messages hide beside its neighbours."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options
from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import evaluate, fold
from autoshard.planner.problem import captured_problem
from autoshard.planner.recipe_candidates import Experts
from autoshard.planner.request import PlanRequest
from autoshard.planner.solver_candidate import stated
from autoshard.planner.standings import SearchTask
from benchmarks.recipe_costs import estimate
from passes.search.model.axis_groups import single_axes
from passes.search.prepared import Prepared

MESH = Mesh("dp=8", hardware="a100-pcie")


class Uneven(nn.Module):
    """Six layers with hidden sizes of `widths`, between two products; forward(x) with x [batch, 512] gives a number."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 512)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).square().mean()


@cache
def prepared(widths: tuple[int, ...]) -> tuple[SearchTask, Prepared]:
    with torch.device("meta"):
        return _stated(Uneven(widths))


def _stated(model: nn.Module) -> tuple[SearchTask, Prepared]:
    x = torch.empty(1 << 16, 512, device="meta")
    problem = captured_problem(PlanRequest(model, (x,), {}, MESH, Options()).checked())
    task = SearchTask(problem, fold(problem), FULL)
    found = stated(task, single_axes(MESH))
    assert found is not None
    return task, found


UNLIKE = tuple(2048 * (number + 1) for number in range(6))


@pytest.mark.parametrize("widths", [UNLIKE, (2048,) * 6, (2048, 4096) * 3], ids=["unlike", "equal", "by turns"])
def test_one_layer_of_a_list_is_exposed(widths: tuple[int, ...]) -> None:
    _, found = prepared(widths)
    segments = {one.name: (one.layers, one.exposed) for one in found.factor_graph.segments}
    assert segments["layers.* forward"] == segments["layers.* backward"] == (6, 1 / 6)
    assert segments["start forward"] == segments["end backward"] == (1, 1.0)


class TwoLists(nn.Module):
    """Eight layers after four others that are first in the order of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = (nn.ModuleList(nn.Linear(512, 512) for _ in range(n)) for n in (8, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.early, *self.late):
            x = x + layer(x).relu()
        return x.square().mean()


def test_what_is_between_two_lists_hides_beside_their_layers() -> None:
    with torch.device("meta"):
        found = _stated(TwoLists())
    exposed = {one.name: one.exposed for one in found[1].factor_graph.segments if ".*" in one.name}
    assert exposed == {"early.* forward": 0.25, "late.* forward": 0.0, "late.* backward": 0.0, "early.* backward": 0.25}


@pytest.mark.parametrize("name", ["fsdp", "zero2", "ddp"])
def test_messages_of_unlike_layers_cost_what_is_simulated(name: str) -> None:
    """They were all exposed by the model, whose objective was up to 1.4 of the simulated step."""
    task, found = prepared(UNLIKE)
    experts = Experts(task.problem, task.folded)
    recipes = dict(experts)[name]
    objective = estimate(experts, recipes, found)
    step = evaluate(task.problem, task.folded, recipes, effort=FULL).cost.step_time
    assert objective == pytest.approx(step, rel=0.05)
