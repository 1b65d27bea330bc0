"""What `seed` pins, case by case, and what it leaves alone."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

import passes.rules  # registers the rules
from passes.base import PassContext
from passes.ir.graph import is_reshard, origin_of
from passes.ir.layout import Layout, Placement, R, Shard, parse_layout
from passes.ir.text import format_graph, parse_graph
from passes.seed import Constraint, Seed
from passes.verify import verify
from tests.passes.rewrite import assert_declines, rewrite

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
    """Return the graph with its pins, without mesh and stage, and what the pass says."""
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


def test_a_gathered_parameter_is_of_its_first_reader() -> None:
    gm, mesh = parse_graph("""\
mesh dp=2,tp=2
stage CAPTURED
%w: f32[8, 8] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 8] = mm(%x, %w)      # net.py:1 embedding
%mm_1: f32[4, 8] = mm(%mm, %w)      # net.py:2 head
return output("output") %mm_1
""")
    first = next(node for node in gm.graph.nodes if node.name == "mm")
    args = first.args
    first.args = (args[0], args[0])
    first.args = args  # now it is the last in the list of readers
    assert Seed(("fsdp", None)).run(gm, PassContext(mesh))
    assert origin_of(next(filter(is_reshard, gm.graph.nodes))).fqn == "embedding"


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


SORTED = """\
mesh dp=2,tp=2
stage CAPTURED
%w: f32[8, 12] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 12] = mm(%x, %w)
%sort: (f32[4, 12], i64[4, 12]) = sort(%mm, 1)
%getitem: f32[4, 12] = getitem(%sort, 0)
return output("output") %getitem
"""
IN_PARTS = 'tp:S(0/2) "megatron: used whole, stored in parts"'


def test_a_weight_that_megatron_uses_whole_is_stored_in_parts_and_gathered() -> None:
    graph, _ = seeded(Seed(("fsdp", "megatron")), SORTED)
    assert f'%w: f32[8, 12] pinned(dp:S(0) "fsdp: stored sharded", {IN_PARTS}) = parameter("w")' in graph
    gathered = 'pinned(dp:R "fsdp: gathered for use", tp:R "megatron: gathered for use") recompute = reshard(%w)'
    assert f"%reshard: f32[8, 12] {gathered}" in graph and "mm(%x, %reshard)" in graph


def test_a_later_program_gathers_a_weight_that_is_stored_in_parts() -> None:
    stored = Layout((R, Shard(0)))
    graph, _ = seeded(Seed((None, "megatron"), stored=(("w", stored),)), SORTED)
    assert 'tp:S(0) "stored already"' in graph and "mm(%x, %reshard)" in graph


@pytest.mark.parametrize("placement", [R, Shard(0)], ids=str)
def test_a_weight_that_the_user_places_is_not_gathered_by_megatron(placement: Placement) -> None:
    graph, _ = seeded(Seed((None, "megatron"), params=(Constraint("w", "tp", placement),)), SORTED)
    assert "reshard" not in graph


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


def test_what_is_stored_already_comes_before_a_constraint() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(params=(Constraint("w", "dp", R),), stored=(("w", Layout((Shard(1),))),)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(1) "stored already") = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
""")


def test_a_constraint_on_an_input_comes_before_the_batch() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("ddp",), inputs=(Constraint("x", "dp", R),)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] pinned(dp:R "options") = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
""")


def test_a_recipe_and_the_storage_of_another_share_a_dim() -> None:
    before = """
mesh dp=2,tp=2
stage CAPTURED
%up: f32[12, 8] = parameter("up")
%down: f32[6, 12] = parameter("down")
%x: f32[4, 8] = input("x")
%permute: f32[8, 12]<1, 8> = permute(%up, [1, 0])
%mm: f32[4, 12] = mm(%x, %permute)
%relu: f32[4, 12] = relu(%mm)
%permute_1: f32[12, 6]<1, 12> = permute(%down, [1, 0])
%mm_1: f32[4, 6] = mm(%relu, %permute_1)
return output("output") %mm_1
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp", "megatron")), before), """\
mesh dp=2,tp=2
stage CAPTURED
%up: f32[12, 8] pinned(tp:S(0) "megatron: column-parallel", dp:S(0/2) "fsdp: stored sharded") = parameter("up")
%down: f32[6, 12] pinned(tp:S(1) "megatron: row-parallel", dp:S(0) "fsdp: stored sharded") = parameter("down")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard_2: f32[6, 12] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%down)      # | seed: fsdp: gathered for use
%reshard_1: f32[12, 8] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%up)      # | seed: fsdp: gathered for use
%permute: f32[8, 12]<1, 8> = permute(%reshard_1, [1, 0])
%mm: f32[4, 12] = mm(%x, %permute)
%relu: f32[4, 12] = relu(%mm)
%permute_1: f32[12, 6]<1, 12> = permute(%reshard_2, [1, 0])
%mm_1: f32[4, 6] = mm(%relu, %permute_1)
%reshard: f32[4, 6] pinned(tp:S(0/2) "megatron: row-parallel output") = reshard(%mm_1)      # | seed: megatron: row-parallel output
return output("output") %reshard
""")  # noqa: E501


def test_two_axes_that_carry_the_batch_split_it_in_turn() -> None:
    before = """
mesh dcn=2,dp=4
stage CAPTURED
%x: f32[8, 6] = input("x")
%relu: f32[8, 6] = relu(%x)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Seed(recipes=("ddp", "ddp")), before), """\
mesh dcn=2,dp=4
stage CAPTURED
%x: f32[8, 6] pinned(dcn:S(0) "ddp: batch", dp:S(0/2) "ddp: batch") = input("x")
%relu: f32[8, 6] = relu(%x)
return output("output") %relu
""")


def test_an_axis_without_a_recipe_pins_nothing() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_declines(Seed(recipes=(None,)), before)


def test_fsdp_stores_parts_and_gathers_again_in_the_backward() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_ddp_stores_parameters_whole() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("ddp",)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "ddp: batch") = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
""")


def test_a_parameter_is_gathered_before_a_cast_to_a_wider_dtype() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: bf16[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%cast: f32[8, 6] = prims.convert_element_type(%w, f32)
%mm: f32[4, 6] = mm(%x, %cast)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",)), before), """\
mesh dp=2
stage CAPTURED
%w: bf16[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: bf16[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%cast: f32[8, 6] = prims.convert_element_type(%reshard, f32)
%mm: f32[4, 6] = mm(%x, %cast)
return output("output") %mm
""")


def test_the_first_dim_that_the_axis_divides_is_split() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[5, 6] = parameter("w")
%x: f32[4, 5] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[5, 6] pinned(dp:S(1) "fsdp: stored sharded") = parameter("w")
%x: f32[4, 5] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[5, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_a_parameter_that_the_axis_does_not_divide_is_padded_on_dim_0() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[5, 7] = parameter("w")
%x: f32[4, 5] = input("x")
%mm: f32[4, 7] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[5, 7] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
%x: f32[4, 5] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[5, 7] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 7] = mm(%x, %reshard)
return output("output") %mm
""")
