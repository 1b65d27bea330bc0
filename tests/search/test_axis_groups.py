"""Axes of a group are used as one: what is found with them is what is found on a mesh in which they are one."""

from __future__ import annotations

from functools import cache

import pytest

from autoshard import MemoryLimitError, Mesh, Options, ShardingPlan, plan
from autoshard.planner import candidates
from autoshard.planner.ties import TIE
from passes.ir.layout import Layout, Shard
from passes.ir.text import parse_graph
from passes.search.goal import Goal
from passes.search.model.axis_groups import AxisGroups, coarse_groups, finer_groups
from passes.search.optimize import solve
from passes.search.prepared import prepare
from tests.planner.test_search import on_meta
from tests.search.random_graphs import random_graph
from tests.search.test_optimize import deep_graph


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        ("dp=32,tp=8", ()),
        ("dp=16,cp=2,tp=8", (((0, 1), (2,)), ((0,), (1, 2)))),
        ("dp=64,cp=2,tp=4", (((0,), (1, 2)), ((0, 1), (2,)))),
        ("pod=2,dp=8,cp=2,tp=8", (((0, 1, 2), (3,)), ((0, 1), (2, 3)))),
        ("dp=4,cp=1,ep=4,tp=8", (((0, 2), (3,), (1,)), ((0,), (2, 3), (1,)))),
        ("dp=2,cp=2,tp=2", (((0, 1), (2,)), ((0,), (1, 2)))),  # all inside a node
        ("a=8,b=8,c=16", (((0, 1), (2,)), ((0,), (1, 2)))),  # none inside a node
    ],
)
def test_the_inner_group_stays_inside_a_node(mesh: str, ways: tuple[AxisGroups, ...]) -> None:
    assert coarse_groups(Mesh(mesh, hardware="h100")) == ways


def test_one_group_is_divided() -> None:
    assert finer_groups(((0, 1), (2, 3))) == (((0,), (1,), (2, 3)), ((0, 1), (2,), (3,)))
    assert finer_groups(((0, 1, 2), (3,))) == (((0,), (1, 2), (3,)), ((0, 1), (2,), (3,)))
    assert finer_groups(((0,), (1,))) == ()


def alike(layout: Layout, axes: tuple[int, ...]) -> bool:
    """Tell whether axes split one dim, one inside the other, or all do the same."""
    placements = [layout.on(axis) for axis in axes]
    if all(isinstance(placement, Shard) for placement in placements):
        outer = [placement.outer for placement in placements]
        return len({placement.dim for placement in placements}) == 1 and outer == sorted(outer)
    return len(set(placements)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_strategies_use_the_axes_of_a_group_alike(seed: int) -> None:
    gm, mesh = parse_graph(random_graph(seed, "dp=2,cp=2,tp=2"))
    factor_graph = prepare(gm, mesh.on(Mesh("tp=2", hardware="h100").hardware), ((0, 1), (2,))).factor_graph
    strategies = [strategy for variable in factor_graph.variables for strategy in variable.strategies]
    assert all(alike(layout, (0, 1)) for strategy in strategies for layout in (*strategy.needs, *strategy.results))
    assert any(layout.on(0) != layout.on(2) for strategy in strategies for layout in strategy.results)


def objective(text: str, axis_groups: AxisGroups | None) -> float:
    gm, mesh = parse_graph(text)
    prepared = prepare(gm, Mesh(mesh.names, mesh.sizes, hardware="h100"), axis_groups)
    return solve(prepared.factor_graph, prepared.node_costs.unit_costs, Goal(gap=1e-6))[0].objective


@pytest.mark.parametrize("seed", range(8))
def test_two_axes_as_one_are_priced_as_one(seed: int) -> None:
    apart = objective(random_graph(seed, "dp=2,cp=8,tp=8"), ((0, 1), (2,)))
    assert apart == pytest.approx(objective(random_graph(seed, "dp=16,tp=8"), None), rel=1e-4)


@pytest.mark.slow
def test_a_group_has_fewer_strategies_and_no_better_assignment() -> None:
    text = deep_graph(3, "dp=2,cp=2,tp=2")
    assert objective(text, None) <= objective(text, ((0, 1), (2,))) * (1 + 1e-6)


@cache
def searched(mesh: str) -> ShardingPlan:
    model, args = on_meta(8192, 1 << 17)
    return plan(model, Mesh(mesh, hardware="h100"), args, options=Options())


@pytest.mark.extended
def test_three_axes_are_as_good_as_two() -> None:
    """The same devices on the same links: what two axes can do, three can."""
    two, three = searched("dp=16,tp=8"), searched("dp=8,cp=2,tp=8")
    assert two.cost is not None and three.cost is not None and three.search is not None
    gap = three.search.solver_gap
    assert gap is None or gap >= 0.0, "what is proven is of no plan that was looked for later"
    assert three.cost.step_time <= two.cost.step_time * (1.005 + TIE)
    quick = two.replan(mesh="dp=8,cp=2,tp=8")
    assert quick.cost is not None and quick.search is not None and quick.solution is not None
    (note,) = [one.note for one in quick.search.candidates if "used alike" in one.note]
    axes = [number for number, name in enumerate(("dp", "cp", "tp")) if name in note.partition(" used")[0].split(" and ")]
    assert quick.search.solver_gap is None and len(axes) == 2
    assert three.cost.step_time * (1 - TIE) <= quick.cost.step_time <= three.cost.step_time * 1.25
    explained = quick.explain("layers.0.0.weight").choices[0].alternatives
    assert len(explained) > 1 and all(alike(one.layout, tuple(axes)) for one in explained)


@pytest.mark.slow
def test_four_axes_are_as_good_as_two() -> None:
    two, four = searched("dp=16,tp=8"), searched("pod=2,dp=8,cp=2,tp=4")
    assert two.cost is not None and four.cost is not None and four.search is not None
    assert four.cost.step_time <= two.cost.step_time * (1.02 + TIE)
    assert four.search.solver_gap is None, "not all plans were looked at"
    assert any("used alike" in one.note for one in four.search.candidates)
    assert len(four.explain("layers.0.0.weight").choices[0].alternatives) > 1


@pytest.mark.slow
def test_four_axes_that_do_not_fit_name_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "SECONDS", 2.0)
    model, args = on_meta(8192, 1 << 17)
    with pytest.raises(MemoryLimitError, match=r"no plan fits in 1.0 MiB.*takes least"):
        plan(model, Mesh("pod=2,dp=2,cp=2,tp=2", hardware="h100"), args, options=Options(memory_limit=1 << 20))
