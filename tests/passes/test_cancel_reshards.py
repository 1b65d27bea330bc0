"""Each rule of `cancel_reshards` on the smallest graph that shows it, and on one that it leaves alone."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.cancel_reshards import CancelReshards
from tests.passes.rewrite import assert_declines, rewrite


def test_a_reshard_to_the_layout_that_the_value_has_is_gone() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:S(0)} = reshard(%x)
%relu: f32[4, 8] {tp:S(0)} = relu(%reshard)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
return output("output") %relu
""")


def test_a_reshard_that_nobody_uses_is_gone() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
return output("output") %relu
""")


def test_a_reshard_of_a_reshard_is_one() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%reshard_1: f32[4, 8] {tp:S(1)} = reshard(%reshard)
%relu: f32[4, 8] {tp:S(1)} = relu(%reshard_1)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard_1: f32[4, 8] {tp:S(1)} = reshard(%x)
%relu: f32[4, 8] {tp:S(1)} = relu(%reshard_1)
return output("output") %relu
""")


def test_a_reshard_and_its_inverse_are_gone() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%reshard_1: f32[4, 8] {tp:S(0)} = reshard(%reshard)
%relu: f32[4, 8] {tp:S(0)} = relu(%reshard_1)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
return output("output") %relu
""")


def test_a_reshard_of_a_reshard_that_another_call_uses_stays() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%relu: f32[4, 8] {tp:R} = relu(%reshard)
%reshard_1: f32[4, 8] {tp:S(1)} = reshard(%reshard)
%exp: f32[4, 8] {tp:S(1)} = exp(%reshard_1)
return output("0") %relu, output("1") %exp
"""
    assert_declines(CancelReshards(), before)


def test_two_reshards_that_become_one_are_made_again_if_either_is() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} recompute = reshard(%x)
%reshard_1: f32[4, 8] {tp:S(1)} = reshard(%reshard)
%relu: f32[4, 8] {tp:S(1)} = relu(%reshard_1)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard_1: f32[4, 8] {tp:S(1)} recompute = reshard(%x)
%relu: f32[4, 8] {tp:S(1)} = relu(%reshard_1)
return output("output") %relu
""")


def test_a_gather_of_a_permute_is_made_before_it() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%permute: f32[8, 4] {tp:S(1)} = permute(%x, [1, 0])
%reshard: f32[8, 4] {tp:R} = reshard(%permute)
%relu: f32[8, 4] {tp:R} = relu(%reshard)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard_1: f32[4, 8] {tp:R} = reshard(%x)
%permute_1: f32[8, 4] {tp:R} = permute(%reshard_1, [1, 0])
%relu: f32[8, 4] {tp:R} = relu(%permute_1)
return output("output") %relu
""")


def test_a_move_to_another_dim_of_a_view_is_made_before_it() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 3, 8] {tp:S(0)} = input("x")
%view: f32[12, 8] {tp:S(0)} = view(%x, [12, 8])
%reshard: f32[12, 8] {tp:S(1)} = reshard(%view)
%relu: f32[12, 8] {tp:S(1)} = relu(%reshard)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 3, 8] {tp:S(0)} = input("x")
%reshard_1: f32[4, 3, 8] {tp:S(2)} = reshard(%x)
%view_1: f32[12, 8] {tp:S(1)} = view(%reshard_1, [12, 8])
%relu: f32[12, 8] {tp:S(1)} = relu(%view_1)
return output("output") %relu
""")


def test_a_reshard_stays_after_a_view_that_its_layout_does_not_pass() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[3, 4, 8] {tp:S(2)} = input("x")
%view: f32[12, 8] {tp:S(1)} = view(%x, [12, 8])
%reshard: f32[12, 8] {tp:S(0)} = reshard(%view)
%relu: f32[12, 8] {tp:S(0)} = relu(%reshard)
return output("output") %relu
"""
    assert_declines(CancelReshards(), before)


def test_a_reshard_of_a_computed_value_stays_after_its_call() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%relu: f32[4, 8] {tp:S(0)} = relu(%x)
%reshard: f32[4, 8] {tp:R} = reshard(%relu)
%exp: f32[4, 8] {tp:R} = exp(%reshard)
return output("output") %exp
"""
    assert_declines(CancelReshards(), before)


def test_equal_reshards_are_one() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%relu: f32[4, 8] {tp:R} = relu(%reshard)
%reshard_1: f32[4, 8] {tp:R} = reshard(%x)
%exp: f32[4, 8] {tp:R} = exp(%reshard_1)
return output("0") %relu, output("1") %exp
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%relu: f32[4, 8] {tp:R} = relu(%reshard)
%exp: f32[4, 8] {tp:R} = exp(%reshard)
return output("0") %relu, output("1") %exp
""")


def test_reshards_of_one_value_to_different_layouts_stay_two() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:S(0)} = input("x")
%reshard: f32[4, 8] {tp:R} = reshard(%x)
%relu: f32[4, 8] {tp:R} = relu(%reshard)
%reshard_1: f32[4, 8] {tp:S(1)} = reshard(%x)
%exp: f32[4, 8] {tp:S(1)} = exp(%reshard_1)
return output("0") %relu, output("1") %exp
"""
    assert_declines(CancelReshards(), before)


def test_a_replicated_value_that_is_taken_in_parts_is_computed_in_parts() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:R} = input("x")
%relu: f32[4, 8] {tp:R} = relu(%x)
%reshard: f32[4, 8] {tp:S(0)} = reshard(%relu)
%exp: f32[4, 8] {tp:S(0)} = exp(%reshard)
return output("output") %exp
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:R} = input("x")
%reshard_1: f32[4, 8] {tp:S(0)} = reshard(%x)
%relu_1: f32[4, 8] {tp:S(0)} = relu(%reshard_1)
%exp: f32[4, 8] {tp:S(0)} = exp(%relu_1)
return output("output") %exp
""")


def test_a_replicated_value_that_a_user_takes_whole_is_computed_whole() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:R} = input("x")
%relu: f32[4, 8] {tp:R} = relu(%x)
%reshard: f32[4, 8] {tp:S(0)} = reshard(%relu)
%exp: f32[4, 8] {tp:S(0)} = exp(%reshard)
return output("0") %relu, output("1") %exp
"""
    assert_declines(CancelReshards(), before)


def test_a_value_that_no_row_makes_in_parts_is_computed_whole() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 8] {tp:R} = input("x")
%softmax: f32[4, 8] {tp:R} = _softmax(%x, 1, False)
%reshard: f32[4, 8] {tp:S(1)} = reshard(%softmax)
%exp: f32[4, 8] {tp:S(1)} = exp(%reshard)
return output("output") %exp
"""
    assert_declines(CancelReshards(), before)


def test_a_factory_is_made_in_parts_for_those_who_take_it_so() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%full: f32[4, 8] {tp:R} = full([4, 8], 1)
%relu: f32[4, 8] {tp:R} = relu(%full)
%reshard: f32[4, 8] {tp:S(0)} = reshard(%full)
%exp: f32[4, 8] {tp:S(0)} = exp(%reshard)
return output("0") %relu, output("1") %exp
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%full_1: f32[4, 8] {tp:S(0)} = full([4, 8], 1)
%full: f32[4, 8] {tp:R} = full([4, 8], 1)
%relu: f32[4, 8] {tp:R} = relu(%full)
%exp: f32[4, 8] {tp:S(0)} = exp(%full_1)
return output("0") %relu, output("1") %exp
""")


def test_a_tensor_of_zeros_is_made_as_a_term_of_a_sum() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[6, 4, 8] {tp:S(0)} = input("x")
%full: f32[4, 8] {tp:R} = full([4, 8], 0)
%sum_1: f32[4, 8] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reshard: f32[4, 8] {tp:P(sum)} = reshard(%full)
%add: f32[4, 8] {tp:P(sum)} = add.Tensor(%sum_1, %reshard)
return output("output") %add
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[6, 4, 8] {tp:S(0)} = input("x")
%full_1: f32[4, 8] {tp:P(sum)} = full([4, 8], 0)
%sum_1: f32[4, 8] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%add: f32[4, 8] {tp:P(sum)} = add.Tensor(%sum_1, %full_1)
return output("output") %add
""")


def test_a_tensor_of_ones_is_not_made_as_a_term_of_a_sum() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[6, 4, 8] {tp:S(0)} = input("x")
%full: f32[4, 8] {tp:R} = full([4, 8], 1)
%sum_1: f32[4, 8] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reshard: f32[4, 8] {tp:P(sum)} = reshard(%full)
%add: f32[4, 8] {tp:P(sum)} = add.Tensor(%sum_1, %reshard)
return output("output") %add
"""
    assert_declines(CancelReshards(), before)


def test_a_part_of_a_call_on_one_value_twice_is_made_of_two_layouts_of_it() -> None:
    before = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 4] {tp:R} = input("x")
%mm: f32[4, 4] {tp:R} = mm(%x, %x)
%reshard: f32[4, 4] {tp:S(0)} = reshard(%mm)
%relu: f32[4, 4] {tp:S(0)} = relu(%reshard)
return output("output") %relu
"""
    assert_expected_inline(rewrite(CancelReshards(), before), """\
mesh tp=2
stage EXPLICIT
%x: f32[4, 4] {tp:R} = input("x")
%reshard_1: f32[4, 4] {tp:S(0)} = reshard(%x)
%mm_1: f32[4, 4] {tp:S(0)} = mm(%reshard_1, %x)
%relu: f32[4, 4] {tp:S(0)} = relu(%mm_1)
return output("output") %relu
""")
