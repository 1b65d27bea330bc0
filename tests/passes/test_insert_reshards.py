"""A disagreement between a producer and a consumer is a node; where they agree, there is none."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.insert_reshards import InsertReshards
from tests.passes.rewrite import assert_declines, rewrite


def test_an_operand_that_is_needed_in_another_layout_is_resharded() -> None:
    before = """
mesh tp=2
stage PLACED
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:R} = relu(%x{tp:R})
return output("output") %relu
"""
    assert_expected_inline(rewrite(InsertReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)      # | insert_reshards: relu needs {tp:R}
%relu: f32[4, 8] {tp:R} = relu(%reshard)
return output("output") %relu
""")


def test_a_result_that_is_needed_in_another_layout_is_resharded() -> None:
    before = """
mesh tp=2
stage PLACED
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
return output("output") %relu{tp:R}
"""
    assert_expected_inline(rewrite(InsertReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
%reshard: f32[4, 8] {tp:R} = reshard(%relu)      # | insert_reshards: output needs {tp:R}
return output("output") %reshard
""")


def test_operands_of_one_value_that_need_the_same_layout_share_a_reshard() -> None:
    before = """
mesh tp=2
stage PLACED
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:R} = relu(%x{tp:R})
%exp: f32[4, 8] {tp:R} = exp(%x{tp:R})
%mul: f32[4, 8] {tp:R} = mul.Tensor(%relu, %exp)
return output("output") %mul
"""
    assert_expected_inline(rewrite(InsertReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)      # | insert_reshards: relu needs {tp:R}
%relu: f32[4, 8] {tp:R} = relu(%reshard)
%exp: f32[4, 8] {tp:R} = exp(%reshard)
%mul: f32[4, 8] {tp:R} = mul.Tensor(%relu, %exp)
return output("output") %mul
""")


def test_operands_of_one_value_that_need_different_layouts_have_a_reshard_each() -> None:
    before = """
mesh tp=2
stage PLACED
%x: f32[4, 8] {tp:R} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x{tp:S(0)})
%exp: f32[4, 8] {tp:S(1)} = exp(%x{tp:S(1)})
return output("0") %relu, output("1") %exp
"""
    assert_expected_inline(rewrite(InsertReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:R} = input("x")
%reshard_1: f32[4, 8] {tp:S(1)} = reshard(%x)      # | insert_reshards: exp needs {tp:S(1)}
%reshard: f32[4, 8] {tp:S(0)} = reshard(%x)      # | insert_reshards: relu needs {tp:S(0)}
%relu: f32[4, 8] {tp:S(0)} = relu(%reshard)
%exp: f32[4, 8] {tp:S(1)} = exp(%reshard_1)
return output("0") %relu, output("1") %exp
""")


def test_of_a_value_that_is_needed_twice_only_the_operand_that_disagrees_is_resharded() -> None:
    before = """
mesh tp=2
stage PLACED
%x: f32[6, 6] {tp:S(0)} = input("x")
%mm: f32[6, 6] {tp:S(0)} = mm(%x, %x{tp:R})
return output("output") %mm
"""
    assert_expected_inline(rewrite(InsertReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[6, 6] {tp:S(0)} = input("x")
%reshard: f32[6, 6] {tp:R} = reshard(%x)      # | insert_reshards: mm needs {tp:R}
%mm: f32[6, 6] {tp:S(0)} = mm(%x, %reshard)
return output("output") %mm
""")


def test_a_graph_whose_layouts_agree_stays() -> None:
    before = """
mesh tp=2
stage PLACED
%w: f32[8, 6] {tp:S(1)} = parameter("w")
%x: f32[4, 8] {tp:R} = input("x")
%mm: f32[4, 6] {tp:S(1)} = mm(%x, %w)
return output("output") %mm
"""
    assert_declines(InsertReshards(), before)
