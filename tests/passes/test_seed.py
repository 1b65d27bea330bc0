"""What `seed` pins, case by case, and what it leaves alone."""

from __future__ import annotations

from expecttest import assert_expected_inline

import passes.rules  # registers the rules
from passes.base import PassContext
from passes.ir.layout import R, Shard, parse_layout
from passes.ir.text import format_graph, parse_graph
from passes.seed import Constraint, Seed
from passes.verify import verify

assert passes.rules

LINEAR = """\
mesh dp=2,tp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""


def seeded(seed: Seed, text: str = LINEAR) -> tuple[str, list[str]]:
    """The graph with its pins, without mesh and stage, and what the pass says."""
    gm, mesh = parse_graph(text)
    ctx = PassContext(mesh)
    seed.run(gm, ctx)
    verify(gm, mesh)
    return "".join(format_graph(gm, mesh).splitlines(keepends=True)[2:]), [remark.text for remark in ctx.remarks]


def test_a_parameter_that_is_stored_already_stays_so() -> None:
    _, mesh = parse_graph(LINEAR)
    graph, _ = seeded(Seed(("fsdp", None), stored=(("w", parse_layout("{dp:S(1), tp:R}", mesh)),)))
    assert_expected_inline(graph, """\
%w: f32[8, 6] pinned(dp:S(1) "stored already", tp:R "stored already") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_a_constraint_comes_before_a_recipe() -> None:
    constraints = (Constraint("w", "dp", Shard(1)), Constraint("w", "tp", R))
    graph, _ = seeded(Seed(("fsdp", "megatron"), params=constraints))
    assert_expected_inline(graph, """\
%w: f32[8, 6] pinned(dp:S(1) "options", tp:R "options") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_two_constraints_on_one_dim_split_what_the_first_left_over() -> None:
    both = (Constraint("w", "dp", Shard(0)), Constraint("w", "tp", Shard(0)))
    assert_expected_inline(seeded(Seed(params=both))[0], """\
%w: f32[8, 6] pinned(dp:S(0) "options", tp:S(0/2) "options") = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
""")


def test_a_constraint_on_an_output_is_a_pinned_reshard() -> None:
    assert_expected_inline(seeded(Seed(outputs=(Constraint("output", "tp", Shard(1)),)))[0], """\
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
%reshard: f32[4, 6] pinned(tp:S(1) "options") = reshard(%mm)      # | seed: options: output
return output("output") %reshard
""")


MLP = """\
mesh tp=2
stage CAPTURED
%up: f32[8, 12] = parameter("up")
%down: f32[12, 8] = parameter("down")
%x: f32[4, 8] = input("x")
%mm: f32[4, 12] = mm(%x, %up)
%relu: f32[4, 12] = relu(%mm)
%mm_1: f32[4, 8] = mm(%relu, %down)
return output("output") %mm_1
"""


def test_megatron_pins_columns_then_rows_and_what_follows() -> None:
    graph, said = seeded(Seed(("megatron",)), MLP)
    assert said == []
    assert_expected_inline(graph, """\
%up: f32[8, 12] pinned(tp:S(1) "megatron: column-parallel") = parameter("up")
%down: f32[12, 8] pinned(tp:S(0) "megatron: row-parallel") = parameter("down")
%x: f32[4, 8] = input("x")
%mm: f32[4, 12] = mm(%x, %up)
%relu: f32[4, 12] = relu(%mm)
%mm_1: f32[4, 8] = mm(%relu, %down)
%reshard: f32[4, 8] pinned(tp:S(0) "megatron: row-parallel output") = reshard(%mm_1)      # | seed: megatron: row-parallel output
return output("output") %reshard
""")


def test_megatron_leaves_whole_what_does_not_divide_and_says_so() -> None:
    graph, said = seeded(Seed(("megatron",)), MLP.replace("tp=2", "tp=5"))
    assert said == [
        "on tp: up stays whole: its 12 columns do not divide by 5",
        "on tp: down stays whole: its 8 columns do not divide by 5",
    ]
    assert "pinned" not in graph


def test_the_batch_is_dim_0_of_inputs_that_are_as_long_as_the_first() -> None:
    inputs = """\
mesh dp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%labels: i64[4] = input("labels")
%table: f32[6, 8] = input("table")
%scale: f32[] = input("scale")
%mul: f32[4, 8] = mul.Tensor(%x, %scale)
return output("output") %mul
"""
    assert_expected_inline(seeded(Seed(("ddp",)), inputs)[0], """\
%x: f32[4, 8] pinned(dp:S(0) "ddp: batch") = input("x")
%labels: i64[4] pinned(dp:S(0) "ddp: batch") = input("labels")
%table: f32[6, 8] = input("table")
%scale: f32[] = input("scale")
%mul: f32[4, 8] = mul.Tensor(%x, %scale)
return output("output") %mul
""")


def test_zero2_gathers_once() -> None:
    graph, _ = seeded(Seed(("zero2", None)))
    assert_expected_inline(graph, """\
%w: f32[8, 6] pinned(dp:S(0) "zero2: stored sharded") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "zero2: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "zero2: gathered for use") = reshard(%w)      # | seed: zero2: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_the_result_of_a_cast_to_fewer_bytes_is_gathered() -> None:
    cast = """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: bf16[4, 8] = input("x")
%cast: bf16[8, 6] = prims.convert_element_type(%w, bf16)
%mm: bf16[4, 6] = mm(%x, %cast)
return output("output") %mm
"""
    graph, _ = seeded(Seed(("fsdp",)), cast)
    assert_expected_inline(graph, """\
%w: f32[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
%x: bf16[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%cast: bf16[8, 6] = prims.convert_element_type(%w, bf16)
%reshard: bf16[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%cast)      # | seed: fsdp: gathered for use
%mm: bf16[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_a_scalar_parameter_stays_whole_with_a_remark() -> None:
    scale = """\
mesh dp=2
stage CAPTURED
%w: f32[] = parameter("w")
%x: f32[4, 8] = input("x")
%mul: f32[4, 8] = mul.Tensor(%x, %w)
return output("output") %mul
"""
    graph, said = seeded(Seed(("fsdp",)), scale)
    assert said == ["w[] is not sharded: no dim can be split"]
    assert "reshard" not in graph


def test_an_axis_of_one_rank_pins_nothing() -> None:
    graph, said = seeded(Seed(("fsdp", "megatron")), LINEAR.replace("dp=2,tp=2", "dp=1,tp=1"))
    assert said == [] and "pinned" not in graph
