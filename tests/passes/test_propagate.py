"""What propagation decides, and why, on the smallest graphs that show it."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import passes.rules  # registers the rules
from passes.base import Pass, PassContext
from passes.cancel_reshards import CancelReshards
from passes.fuse_collectives import FuseCollectives
from passes.insert_reshards import InsertReshards
from passes.ir.collectives import is_step
from passes.ir.graph import is_reshard, layout_of, needs_of
from passes.ir.layout import Shard
from passes.ir.text import parse_graph
from passes.lower_reshards import LowerReshards
from passes.manager import PassManager
from passes.observers import Verifier
from passes.propagate import Propagate
from passes.seed import Constraint, Seed

assert passes.rules


def place(text: str, *stages: Pass, seed: Seed | None = None) -> tuple[GraphModule, PassContext]:
    gm, mesh = parse_graph(text)
    ctx = PassContext(mesh)
    before = () if seed is None else (seed,)
    PassManager((*before, Propagate(), *stages), (Verifier(),)).run(gm, ctx)
    return gm, ctx


def layouts(gm: GraphModule, ctx: PassContext) -> dict[str, str]:
    named = {n.name: n for n in gm.graph.nodes if n.op != "output"}
    return {name: layout_of(n).format(ctx.mesh) for name, n in named.items() if isinstance(n.meta["val"], torch.Tensor)}


LINEAR = """
mesh dp=2,tp=2
stage CAPTURED
%w: f32[8, 6]{w} = parameter("w")
%x: f32[4, 8]{x} = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""


def linear(w: str = "", x: str = "") -> str:
    pins = {key: f" pinned({value})" if value else "" for key, value in (("w", w), ("x", x))}
    return LINEAR.strip().replace("{w}", pins["w"]).replace("{x}", pins["x"]) + "\n"


def test_a_split_batch_needs_no_communication() -> None:
    gm, ctx = place(linear(x='dp:S(0) "batch"'))
    assert layouts(gm, ctx)["mm"] == "{dp:S(0), tp:R}"
    assert [need.format(ctx.mesh) for need in needs_of(gm.graph.output_node())] == ["{dp:S(0), tp:R}"]


@pytest.mark.parametrize(("w", "x"), [("R", "S(0)"), ("S(0)", "R")])
def test_an_input_may_have_the_name_of_a_parameter(w: str, x: str) -> None:
    gm, ctx = place(
        f"""mesh dp=2
stage CAPTURED
%w: f32[8] pinned(dp:{w} "options") = parameter("b.weight")
%x: f32[8] pinned(dp:{x} "options") = input("b.weight")
%mul: f32[8] = mul(%x, %w)
return output("output") %mul, gradient("b.weight") %mul, gradient("input:b.weight") %mul
"""
    )
    assert [need.format(ctx.mesh) for need in needs_of(gm.graph.output_node())][1:] == [f"{{dp:{w}}}", f"{{dp:{x}}}"]


def test_a_column_parallel_weight_gives_sharded_columns_and_a_whole_output() -> None:
    gm, ctx = place(linear(w='tp:S(1) "column"'))
    assert layouts(gm, ctx)["mm"] == "{dp:R, tp:S(1)}"
    assert [need.format(ctx.mesh) for need in needs_of(gm.graph.output_node())] == ["{dp:R, tp:R}"]


def test_a_row_parallel_weight_takes_its_part_of_a_whole_input() -> None:
    gm, ctx = place(linear(w='tp:S(0) "row"'))
    assert layouts(gm, ctx)["mm"] == "{dp:R, tp:P(sum)}"


def test_where_operands_conflict_the_parameter_stays_and_a_remark_says_so() -> None:
    gm, ctx = place(linear(w='tp:S(1) "column"', x='tp:S(0) "sequence"'))
    assert layouts(gm, ctx)["mm"] == "{dp:R, tp:S(1)}"
    assert "a parameter stays: operands S(0), S(1) become R, S(1), giving S(1)" in str(ctx.remarks[0])


def test_both_axes_of_a_mesh_are_placed_on_their_own() -> None:
    gm, ctx = place(linear(w='tp:S(1) "column"', x='dp:S(0) "batch"'))
    assert layouts(gm, ctx)["mm"] == "{dp:S(0), tp:S(1)}"


MLP = """
mesh tp=2
stage CAPTURED
%up: f32[8, 12] pinned(tp:S(1) "column") = parameter("up")
%down: f32[12, 8] pinned(tp:S(0) "row") = parameter("down")
%x: f32[4, 8] pinned(tp:S(0) "sequence") = input("x")
%mm: f32[4, 12] = mm(%x, %up)
%relu: f32[4, 12] = relu(%mm)
%mm_1: f32[4, 8] = mm(%relu, %down)
%add: f32[4, 8] = add.Tensor(%x, %mm_1)
return output("output") %add
"""


def test_megatron_mlp_needs_one_gather_and_one_reduce_scatter() -> None:
    gm, _ = place(MLP.lstrip(), InsertReshards(), FuseCollectives(), CancelReshards(), LowerReshards())
    steps = [node.target.__name__ for node in gm.graph.nodes if is_step(node)]
    assert steps == ["all_gather", "reduce_scatter"]


PARTIAL = """
mesh tp=2
stage CAPTURED
%w: f32[8, 6] pinned(tp:S(0) "row") = parameter("w")
%x: f32[4, 8] = input("x")
%s: f32[4, 6] pinned(tp:S(0) "sequence") = input("s")
%mm: f32[4, 6] = mm(%x, %w)
%neg: f32[4, 6] = neg(%mm)
%mul: f32[4, 6] = mul.Tensor(%neg, %s)
%exp: f32[4, 6] = exp(%neg)
%add: f32[4, 6] = add.Tensor(%mul, %exp)
return output("output") %add
"""


def test_a_partial_sum_that_two_users_take_is_reduced_once_to_the_sharding_they_want() -> None:
    gm, ctx = place(PARTIAL.lstrip())
    reshards = [node for node in gm.graph.nodes if is_reshard(node)]
    assert [layout_of(node).format(ctx.mesh) for node in reshards] == ["{tp:S(0)}"]
    assert layouts(gm, ctx)["neg"] == "{tp:P(sum)}"


def test_an_op_without_a_rule_runs_replicated_with_a_remark() -> None:
    text = linear(x='tp:S(0) "batch"').replace("mm(%x, %w)", "isin.Tensor_Tensor(%x, %w)").replace("f32[4, 6] =", "b8[4, 8] =")
    _, ctx = place(text)
    said = [remark.text for remark in ctx.remarks]
    assert any("isin.Tensor_Tensor has no sharding rule: runs replicated on tp" in text for text in said)


def test_the_users_placement_comes_before_the_recipe() -> None:
    seed = Seed(("fsdp", None), params=(Constraint("w", "dp", Shard(1)),))
    gm, ctx = place(linear(), seed=seed)
    assert layouts(gm, ctx)["w"] == "{dp:S(1), tp:R}"
