"""One record of facts per node: copies share it until one of them changes."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule, Node

from passes.errors import CompilerError
from passes.ir.graph import (
    Stage,
    copy_facts,
    copy_graph,
    facts_of,
    is_recompute,
    layout_of,
    note_of,
    origin_of,
    region_of,
    set_note,
    set_recompute,
    set_stage,
    stage_of,
    update_facts,
)
from passes.ir.text import parse_graph

TEXT = """\
mesh tp=2
stage EXPLICIT
%x: f32[4] {tp:S(0)} = input("x")
%relu: f32[4] {tp:S(0)} recompute region(3) = relu(%x)      # model.py:7 layers.0 | seed: why
%neg: f32[4] {tp:S(0)} = neg(%relu)
return output("0") %neg
"""


def node_of(gm: GraphModule, name: str) -> Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def test_a_copied_graph_shares_records_until_one_changes() -> None:
    gm, _ = parse_graph(TEXT)
    copied = copy_graph(gm)
    assert facts_of(node_of(copied, "relu")) is facts_of(node_of(gm, "relu"))
    set_recompute(node_of(copied, "relu"), False)
    set_stage(copied, Stage.COLLECTIVE)
    assert is_recompute(node_of(gm, "relu")) and stage_of(gm) is Stage.EXPLICIT
    assert note_of(node_of(copied, "relu")) == "seed: why"


def test_a_fact_that_is_set_again_leaves_the_record() -> None:
    node = node_of(parse_graph(TEXT)[0], "relu")
    before = facts_of(node)
    set_recompute(node, True)
    assert facts_of(node) is before


def test_a_copy_of_facts_is_the_place_in_the_users_program() -> None:
    gm, _ = parse_graph(TEXT)
    relu, neg = node_of(gm, "relu"), node_of(gm, "neg")
    copy_facts(relu, neg)
    assert (origin_of(neg).fqn, region_of(neg)) == ("layers.0", 3)
    assert (note_of(neg), is_recompute(neg)) == ("", False)


def test_a_fact_that_there_is_not_cannot_be_set() -> None:
    with pytest.raises(KeyError):
        update_facts(node_of(parse_graph(TEXT)[0], "x"), colour="red")


def test_a_layout_that_was_not_set_is_an_error() -> None:
    node = node_of(parse_graph(TEXT)[0], "x")
    set_note(node, "kept")
    update_facts(node, layouts=None)
    with pytest.raises(CompilerError, match="%x has no layout; it was not placed"):
        layout_of(node)
