"""Calls that are decided about together, and what is left of their strategies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import passes.rules  # registers the rules
from autoshard import Mesh, plan
from passes.ir.text import parse_graph
from passes.search.model import grouping
from passes.search.model.axis_groups import single_axes
from passes.search.model.grouping import Grouping, joint_strategies
from passes.search.model.strategies import RowTables, Strategies

assert passes.rules

NORM = """mesh tp=2
stage CAPTURED
%x: bf16[8, 64] = input("x")
%w: bf16[64, 32] = parameter("w")
%mm: bf16[8, 32] = mm(%x, %w)
%view: bf16[2, 4, 32] = view(%mm, [2, 4, 32])
%wide: f32[2, 4, 32] = prims.convert_element_type(%view, f32)
%pow_1: f32[2, 4, 32] = pow.Tensor_Scalar(%wide, 2)
%sum_1: f32[2, 4, 1] = sum.dim_IntList(%pow_1, [2], True)
%rsqrt: f32[2, 4, 1] = rsqrt(%sum_1)
%mul: f32[2, 4, 32] = mul.Tensor(%wide, %rsqrt)
return output("output") %mul
"""


def grouped(text: str) -> tuple[Graph, Strategies, list[set[str]]]:
    gm, mesh = parse_graph(text)
    strategies = Strategies(RowTables(gm.graph, is_large=True), mesh, single_axes(mesh))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    groups = Grouping(gm.graph, strategies, (), lambda node: 0).of(calls)
    return gm.graph, strategies, [{node.name for node in group} for group in groups]


def test_a_kernel_is_one_but_where_it_sums_terms_and_a_cast_widens() -> None:
    _, _, groups = grouped(NORM)
    assert {"wide", "pow_1", "sum_1", "mul"} in groups  # partial sums have to be reduced before rsqrt
    assert {"rsqrt"} in groups


def test_a_view_goes_with_the_call_whose_every_layout_it_can_take() -> None:
    _, _, groups = grouped(NORM.replace("[2, 4, 32]", "[8, 2, 16]").replace("[2, 4, 1]", "[8, 2, 1]"))
    assert {"mm"} in groups  # its terms are summed before the norm, and so before the view of them
    plain = NORM[: NORM.index("%wide")] + 'return output("output") %view\n'
    assert {"mm", "view"} in grouped(plain)[2]


def test_a_group_has_one_layout_of_each_value_inside() -> None:
    graph, strategies, _ = grouped(NORM)
    nodes = {node.name: node for node in graph.nodes}
    group = [nodes["wide"], nodes["pow_1"], nodes["sum_1"], nodes["mul"]]
    own = {node: strategies.of(node) for node in group}
    ((part, found),) = joint_strategies(group, own)
    assert list(part) == group
    assert found and len(set(found)) == len(found)
    for picked in found:
        wide, pow_1, sum_1, mul = (own[node][one] for node, one in zip(group, picked, strict=True))
        assert wide.results[0] == pow_1.needs[0] == mul.needs[0]
        assert pow_1.results[0] == sum_1.needs[0]


SUM = """
mesh dp=2,tp=2
stage CAPTURED
%a: f32[4, 8] = input("a")
%b: f32[4, 8] = input("b")
%c: f32[4, 8] = input("c")
%d: f32[4, 8] = input("d")
%e: f32[4, 8] = input("e")
%ab: f32[4, 8] = add.Tensor(%a, %b)
%cd: f32[4, 8] = add.Tensor(%c, %d)
%abcd: f32[4, 8] = add.Tensor(%ab, %cd)
%total: f32[4, 8] = add.Tensor(%abcd, %e)
return output("output") %total
"""


def test_a_group_of_too_many_strategies_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels such as those of `grid_sample` read dozens of values, which any of their calls may need in several layouts."""
    graph, strategies, _ = grouped(SUM)
    group = [node for node in graph.nodes if node.op == "call_function"]
    own = {node: strategies.of(node) for node in group}
    ((_, whole),) = joint_strategies(group, own)
    monkeypatch.setattr(grouping, "FEW", len(whole) - 1)
    monkeypatch.setattr(grouping, "MORE", 0)
    parts = list(joint_strategies(group, own))
    assert [[node.name for node in part] for part, _ in parts] == [["ab"], ["cd"], ["abcd"], ["total"]]
    assert all(len(found) == len(own[part[0]]) for part, found in parts)


def test_terms_are_multiplied_by_numbers_only() -> None:
    graph, strategies, _ = grouped(NORM)
    nodes = {node.name: node for node in graph.nodes}
    assert any(strategy.results[0].has_partial for strategy in strategies.of(nodes["mm"]))
    assert not any(strategy.needs[0].has_partial for strategy in strategies.of(nodes["mul"]))


class Warped(nn.Module):
    """Sample an image where a convolution of it says, a kernel that reads dozens of values; forward(x [batch, 3, 4, 6])."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.where = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        values, rows = self.conv(x), self.where(x.mean((2, 3))).unflatten(1, (2, 3))
        grid = nn.functional.affine_grid(rows, list(values.shape), align_corners=False)
        return nn.functional.grid_sample(values, grid, align_corners=False).square().mean()


@pytest.mark.slow
def test_a_kernel_that_reads_dozens_of_values_is_planned() -> None:
    """All strategies of its calls together took 7 GB, and all memory on three axes."""
    made = plan(Warped(), Mesh("dp=2,cp=2,tp=2", hardware="h100"), (torch.zeros(4, 3, 4, 6),))
    assert made.state is not None and made.state.prepared is not None
    variables = made.state.prepared.factor_graph.variables
    largest = max(len(one.strategies) for one in variables if len(one.nodes) == 1)
    assert all(len(one.strategies) <= max(grouping.FEW, grouping.MORE * largest) for one in variables)
