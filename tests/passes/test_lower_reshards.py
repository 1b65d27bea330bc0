"""Which steps a reshard becomes, and where they stand."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.lower_reshards import LowerReshards
from tests.passes.rewrite import assert_declines, rewrite


def test_a_shard_that_is_needed_whole_is_gathered() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[8, 12] {tp:S(0)} = input("x")
%reshard: f32[8, 12] {tp:R} = reshard(%x)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:S(0)} = input("x")
%all_gather: f32[8, 12] {tp:R} = all_gather(%x, ["tp"])
return output("output") %all_gather
""")


def test_a_sum_that_is_needed_whole_is_reduced() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reshard: f32[8, 12] {tp:R} = reshard(%sum_1)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%all_reduce: f32[8, 12] {tp:R} = all_reduce(%sum_1, ["tp"])
return output("output") %all_reduce
""")


def test_a_sum_that_is_needed_in_parts_is_scattered() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reshard: f32[8, 12] {tp:S(1)} = reshard(%sum_1)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reduce_scatter: f32[8, 12] {tp:S(1)} = reduce_scatter(%sum_1, ["tp"])
return output("output") %reduce_scatter
""")


def test_a_shard_that_is_needed_on_another_dim_is_exchanged() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[8, 12] {tp:S(0)} = input("x")
%reshard: f32[8, 12] {tp:S(1)} = reshard(%x)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:S(0)} = input("x")
%all_to_all: f32[8, 12] {tp:S(1)} = all_to_all(%x, ["tp"])
return output("output") %all_to_all
""")


def test_a_whole_value_that_is_needed_in_parts_sends_nothing() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[8, 12] {tp:R} = input("x")
%reshard: f32[8, 12] {tp:S(1)} = reshard(%x)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:R} = input("x")
%take_part: f32[8, 12] {tp:S(1)} = take_part(%x, ["tp"])
return output("output") %take_part
""")


def test_two_axes_that_gather_one_dim_do_it_in_one_collective() -> None:
    before = """
mesh dp=2,tp=2
stage EXPLICIT
%x: f32[8, 12] {dp:S(0/2), tp:S(0)} = input("x")
%reshard: f32[8, 12] {dp:R, tp:R} = reshard(%x)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh dp=2,tp=2
stage COLLECTIVE
%x: f32[8, 12] {dp:S(0/2), tp:S(0)} = input("x")
%all_gather: f32[8, 12] {dp:R, tp:R} = all_gather(%x, ["dp", "tp"])
return output("output") %all_gather
""")


def test_a_part_is_taken_before_the_rest_is_gathered() -> None:
    before = """
mesh dp=2,tp=2
stage EXPLICIT
%x: f32[8, 12] {dp:S(0), tp:R} = input("x")
%reshard: f32[8, 12] {dp:R, tp:S(1)} = reshard(%x)
return output("output") %reshard
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh dp=2,tp=2
stage COLLECTIVE
%x: f32[8, 12] {dp:S(0), tp:R} = input("x")
%take_part: f32[8, 12] {dp:S(0), tp:S(1)} = take_part(%x, ["tp"])
%all_gather: f32[8, 12] {dp:R, tp:S(1)} = all_gather(%take_part, ["dp"])
return output("output") %all_gather
""")


def test_a_gather_stands_before_the_first_use_of_what_it_makes() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%y: f32[3, 5] {tp:R} = input("y")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%exp: f32[3, 5] {tp:R} = exp(%y)
%relu: f32[4, 8] {tp:R} = relu(%reshard)
return output("0") %exp, output("1") %relu
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8] {tp:S(0)} = input("x")
%y: f32[3, 5] {tp:R} = input("y")
%exp: f32[3, 5] {tp:R} = exp(%y)
%all_gather: f32[4, 8] {tp:R} = all_gather(%x, ["tp"])
%relu: f32[4, 8] {tp:R} = relu(%all_gather)
return output("0") %exp, output("1") %relu
""")


def test_a_scatter_stands_after_what_it_shrinks() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[6, 4, 8] {tp:S(0)} = input("x")
%y: f32[3, 5] {tp:R} = input("y")
%sum_1: f32[4, 8] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reshard: f32[4, 8] {tp:S(0)} = reshard(%sum_1)
%exp: f32[3, 5] {tp:R} = exp(%y)
%relu: f32[4, 8] {tp:S(0)} = relu(%reshard)
return output("0") %exp, output("1") %relu
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%x: f32[6, 4, 8] {tp:S(0)} = input("x")
%y: f32[3, 5] {tp:R} = input("y")
%sum_1: f32[4, 8] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reduce_scatter: f32[4, 8] {tp:S(0)} = reduce_scatter(%sum_1, ["tp"])
%exp: f32[3, 5] {tp:R} = exp(%y)
%relu: f32[4, 8] {tp:S(0)} = relu(%reduce_scatter)
return output("0") %exp, output("1") %relu
""")


def test_a_parameter_is_gathered_and_moved_before_its_use() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%w: f32[8, 6] {tp:S(0)} = parameter("w")
%x: f32[4, 6] {tp:R} = input("x")
%reshard: f32[8, 6] {tp:R} recompute = reshard(%w)
%permute: f32[6, 8]<1, 6> {tp:R} = permute(%reshard, [1, 0])
%relu: f32[4, 6] {tp:R} = relu(%x)
%mm: f32[4, 8] {tp:R} = mm(%relu, %permute)
return output("output") %mm
"""
    assert_expected_inline(rewrite(LowerReshards(), before), """\
mesh tp=2
stage COLLECTIVE
%w: f32[8, 6] {tp:S(0)} = parameter("w")
%x: f32[4, 6] {tp:R} = input("x")
%relu: f32[4, 6] {tp:R} = relu(%x)
%all_gather: f32[8, 6] {tp:R} recompute = all_gather(%w, ["tp"])
%permute: f32[6, 8]<1, 6> {tp:R} = permute(%all_gather, [1, 0])
%mm: f32[4, 8] {tp:R} = mm(%relu, %permute)
return output("output") %mm
""")


def test_a_graph_without_reshards_stays() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
return output("output") %relu
"""
    assert_declines(LowerReshards(), before)
