"""Calls that are decided about together, and what is left of their strategies."""

from __future__ import annotations

from torch.fx import Graph

import passes.rules  # registers the rules
from passes.ir.text import parse_graph
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
    found = joint_strategies(group, own)
    assert found and len(set(found)) == len(found)
    for picked in found:
        wide, pow_1, sum_1, mul = (own[node][one] for node, one in zip(group, picked, strict=True))
        assert wide.results[0] == pow_1.needs[0] == mul.needs[0]
        assert pow_1.results[0] == sum_1.needs[0]


def test_terms_are_multiplied_by_numbers_only() -> None:
    graph, strategies, _ = grouped(NORM)
    nodes = {node.name: node for node in graph.nodes}
    assert any(strategy.results[0].has_partial for strategy in strategies.of(nodes["mm"]))
    assert not any(strategy.needs[0].has_partial for strategy in strategies.of(nodes["mul"]))
