"""Padded and cut convolutions become aligned ones, on the smallest graph that shows it; others are left alone."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from passes.normalize import Normalize
from tests.passes.rewrite import assert_declines, assert_same_values, rewrite

HEAD = """
mesh cp=2
stage CAPTURED
%w: f32[4, 2, 3] = parameter("w")
%x: f32[3, 2, 8] = input("x")
"""
PADDED = HEAD + """\
%constant_pad_nd: f32[3, 2, 10] = constant_pad_nd(%x, [2, 0], 0.0)
%convolution: f32[3, 4, 8] = convolution(%constant_pad_nd, %w, None, [1], [0], [1], False, [0], 1)
return output("output") %convolution
"""
CUT = HEAD + """\
%convolution: f32[3, 4, 10] = convolution(%x, %w, None, [1], [2], [1], False, [0], 1)
%slice_1: f32[3, 4, 8]<40, 10, 1> = slice.Tensor(%convolution, 2, 0, 8)
%relu: f32[3, 4, 8] = relu(%slice_1)
return output("output") %relu
"""


def test_a_convolution_of_what_is_padded_before() -> None:
    assert_expected_inline(rewrite(Normalize(), PADDED), """\
mesh cp=2
stage CAPTURED
%w: f32[4, 2, 3] = parameter("w")
%x: f32[3, 2, 8] = input("x")
%aligned_convolution: f32[3, 4, 8] = autoshard.aligned_convolution(%x, %w, [1], [2], [1], 1)
return output("output") %aligned_convolution
""")
    assert_same_values(Normalize(), PADDED)


def test_the_first_results_of_a_convolution() -> None:
    assert_expected_inline(rewrite(Normalize(), CUT), """\
mesh cp=2
stage CAPTURED
%w: f32[4, 2, 3] = parameter("w")
%x: f32[3, 2, 8] = input("x")
%aligned_convolution: f32[3, 4, 8] = autoshard.aligned_convolution(%x, %w, [1], [2], [1], 1)
%relu: f32[3, 4, 8] = relu(%aligned_convolution)
return output("output") %relu
""")
    assert_same_values(Normalize(), CUT)


def test_its_gradients_are_those_of_what_was_left() -> None:
    before = """
mesh cp=2
stage CAPTURED
%w: f32[4, 2, 3] = parameter("w")
%x: f32[3, 2, 8] = input("x")
%t: f32[3, 4, 8] = input("t")
%full: f32[3, 4, 10] = full([3, 4, 10], 0, dtype=f32, layout=torch.strided, device=device(cpu), pin_memory=False)
%slice_scatter: f32[3, 4, 10] = slice_scatter(%full, %t, 2, 0, 8)
%convolution_backward: (f32[3, 2, 8], f32[4, 2, 3], None) = convolution_backward(%slice_scatter, %x, %w, None, [1], [2], \
[1], False, [0], 1, [True, True, False])
%getitem: f32[3, 2, 8] = getitem(%convolution_backward, 0)
%getitem_1: f32[4, 2, 3] = getitem(%convolution_backward, 1)
%sum_1: f32[4] = sum.dim_IntList(%slice_scatter, [0, 2])
return output("x") %getitem, output("w") %getitem_1, output("b") %sum_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh cp=2
stage CAPTURED
%w: f32[4, 2, 3] = parameter("w")
%x: f32[3, 2, 8] = input("x")
%t: f32[3, 4, 8] = input("t")
%aligned_convolution_weight: f32[4, 2, 3] = autoshard.aligned_convolution_weight(%t, %x, %w, [1], [2], [1], 1)
%aligned_convolution_input: f32[3, 2, 8] = autoshard.aligned_convolution_input(%t, %w, [1], [2], [1], 1)
%sum_2: f32[4] = sum.dim_IntList(%t, [0, 2])
return output("x") %aligned_convolution_input, output("w") %aligned_convolution_weight, output("b") %sum_2
""")
    assert_same_values(Normalize(), before)


@pytest.mark.parametrize(
    "before",
    [
        PADDED.replace("[2, 0], 0.0", "[2, 0], 1.0"),
        PADDED.replace("[2, 0]", "[4, 0]").replace("3, 2, 10]", "3, 2, 12]").replace("4, 8]", "4, 10]"),
        CUT.replace("2, 0, 8)", "2, 0, 7)").replace("4, 8]", "4, 7]"),
        CUT.replace("output(\"output\") %relu", "output(\"output\") %relu, output(\"whole\") %convolution"),
        CUT.replace("2, 0, 8)", "2, 0, 10, 2)").replace("4, 8]<40, 10, 1>", "4, 5]<40, 10, 2>").replace("4, 8]", "4, 5]"),
    ],
    ids=["ones", "longer", "shorter", "used_whole", "steps"],
)
def test_others_stay(before: str) -> None:
    assert_declines(Normalize(), before)
