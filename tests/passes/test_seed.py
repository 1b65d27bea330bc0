"""Which placements `seed` pins, for whom, and which pin stays where two want one axis."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.ir.layout import Layout, R, Shard
from passes.seed import Constraint, Seed
from tests.passes.rewrite import assert_declines, rewrite, rewrite_with_remarks


def test_a_parameter_that_is_stored_already_stays_as_it_is() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",), stored=(("w", Layout((Shard(1),))),)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(1) "stored already") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


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


def test_a_constraint_on_a_parameter_comes_before_a_recipe() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",), params=(Constraint("w", "dp", Shard(1)),)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(1) "options") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
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


def test_a_constraint_on_an_output_is_on_a_reshard_of_it() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(outputs=(Constraint("output", "dp", Shard(1)),)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
%reshard: f32[4, 6] pinned(dp:S(1) "options") = reshard(%mm)      # | seed: options: output
return output("output") %reshard
""")


def test_a_second_constraint_on_a_dim_splits_what_the_first_leaves() -> None:
    before = """
mesh dp=2,tp=4
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(params=(Constraint("w", "dp", Shard(0)), Constraint("w", "tp", Shard(0)))), before), """\
mesh dp=2,tp=4
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(0) "options", tp:S(0/2) "options") = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
""")


def test_an_axis_of_one_rank_is_not_constrained() -> None:
    before = """
mesh dp=2,tp=1
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp", None), params=(Constraint("w", "tp", Shard(0)),)), before), """\
mesh dp=2,tp=1
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
%mm: f32[4, 6] = mm(%x, %reshard)
return output("output") %mm
""")


def test_what_a_recipe_decides_is_pinned() -> None:
    before = """
mesh tp=2
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
    assert_expected_inline(rewrite(Seed(recipes=("megatron",)), before), """\
mesh tp=2
stage CAPTURED
%up: f32[12, 8] pinned(tp:S(0) "megatron: column-parallel") = parameter("up")
%down: f32[6, 12] pinned(tp:S(1) "megatron: row-parallel") = parameter("down")
%x: f32[4, 8] = input("x")
%permute: f32[8, 12]<1, 8> = permute(%up, [1, 0])
%mm: f32[4, 12] = mm(%x, %permute)
%relu: f32[4, 12] = relu(%mm)
%permute_1: f32[12, 6]<1, 12> = permute(%down, [1, 0])
%mm_1: f32[4, 6] = mm(%relu, %permute_1)
%reshard: f32[4, 6] pinned(tp:S(0) "megatron: row-parallel output") = reshard(%mm_1)      # | seed: megatron: row-parallel output
return output("output") %reshard
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


def test_the_batch_is_dim_0_of_every_input_that_is_as_long_as_the_first() -> None:
    before = """
mesh dp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%mask: f32[4] = input("mask")
%scale: f32[8] = input("scale")
%step: f32[] = input("step")
%mul: f32[4, 8] = mul.Tensor(%x, %scale)
%mul_1: f32[4, 8] = mul.Tensor(%mul, %step)
return output("0") %mul_1, output("1") %mask
"""
    assert_expected_inline(rewrite(Seed(recipes=("ddp",)), before), """\
mesh dp=2
stage CAPTURED
%x: f32[4, 8] pinned(dp:S(0) "ddp: batch") = input("x")
%mask: f32[4] pinned(dp:S(0) "ddp: batch") = input("mask")
%scale: f32[8] = input("scale")
%step: f32[] = input("step")
%mul: f32[4, 8] = mul.Tensor(%x, %scale)
%mul_1: f32[4, 8] = mul.Tensor(%mul, %step)
return output("0") %mul_1, output("1") %mask
""")


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


def test_zero2_stores_parts_and_keeps_what_it_gathers() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("zero2",)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(0) "zero2: stored sharded") = parameter("w")
%x: f32[4, 8] pinned(dp:S(0) "zero2: batch") = input("x")
%reshard: f32[8, 6] pinned(dp:R "zero2: gathered for use") = reshard(%w)      # | seed: zero2: gathered for use
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


def test_a_parameter_is_gathered_in_the_narrower_dtype_of_its_cast() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: bf16[4, 8] = input("x")
%cast: bf16[8, 6] = prims.convert_element_type(%w, bf16)
%mm: bf16[4, 6] = mm(%x, %cast)
return output("output") %mm
"""
    assert_expected_inline(rewrite(Seed(recipes=("fsdp",)), before), """\
mesh dp=2
stage CAPTURED
%w: f32[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
%x: bf16[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%cast: bf16[8, 6] = prims.convert_element_type(%w, bf16)
%reshard: bf16[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%cast)      # | seed: fsdp: gathered for use
%mm: bf16[4, 6] = mm(%x, %reshard)
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


def test_a_parameter_without_dims_is_stored_whole_and_it_is_said() -> None:
    before = """
mesh dp=2
stage CAPTURED
%scale: f32[] = parameter("scale")
%x: f32[4, 8] = input("x")
%mul: f32[4, 8] = mul.Tensor(%x, %scale)
return output("output") %mul
"""
    after, remarks = rewrite_with_remarks(Seed(recipes=("fsdp",)), before)
    assert remarks == ["scale[] is not sharded: no dim can be split"]
    assert_expected_inline(after, """\
mesh dp=2
stage CAPTURED
%scale: f32[] = parameter("scale")
%x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
%mul: f32[4, 8] = mul.Tensor(%x, %scale)
return output("output") %mul
""")
