"""Reversals that `normalize` removes, on the smallest graph that shows it."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.normalize import Normalize
from tests.passes.rewrite import assert_declines, assert_same_values, rewrite

BEFORE = """
mesh cp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%rev: f32[4, 6] = prims.rev(%x, [1])
%cumsum: f32[4, 6] = cumsum(%rev, 1)
%rev_1: f32[4, 6] = prims.rev(%cumsum, [1])
%relu: f32[4, 6] = relu(%rev_1)
return output("output") %relu
"""


def test_a_cumulative_sum_between_reversals_is_one_from_the_end() -> None:
    assert_expected_inline(rewrite(Normalize(), BEFORE), """\
mesh cp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%reversed_cumsum: f32[4, 6] = autoshard.reversed_cumsum(%x, 1)
%relu: f32[4, 6] = relu(%reversed_cumsum)
return output("output") %relu
""")
    assert_same_values(Normalize(), BEFORE)


def test_two_reversals_are_none() -> None:
    before = BEFORE.replace("cumsum(%rev, 1)", "exp(%rev)").replace("cumsum", "exp").replace("%rev_1:", "%rev_2:")
    before = before.replace("(%exp, [1])", "(%rev, [1])").replace("relu(%rev_1)", "relu(%rev_2)")
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh cp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%relu: f32[4, 6] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_reversals_of_another_dim_stay() -> None:
    assert_declines(Normalize(), BEFORE.replace("rev(%x, [1])", "rev(%x, [0])"))
    assert_declines(Normalize(), BEFORE.replace("[1])", "[0])"))
