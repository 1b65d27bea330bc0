"""Calls that the backend has no kernel for are in pieces; all others are left whole."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.decompose import Decompose
from tests.passes.rewrite import assert_declines, rewrite


def test_a_call_with_a_decomposition_becomes_its_pieces() -> None:
    before = """
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%mask: b8[4, 8] {tp:R} = input("mask")
%masked_fill: f32[4, 8] {tp:R} = masked_fill.Scalar(%x, %mask, 0)
return output("output") %masked_fill
"""
    assert_expected_inline(rewrite(Decompose(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%mask: b8[4, 8] {tp:R} = input("mask")
%scalar_tensor: f32[] = scalar_tensor(0.0, dtype=f32, layout=torch.strided, device=device(cpu))
%where: f32[4, 8] {tp:R} = where.self(%mask, %scalar_tensor, %x)
return output("output") %where
""")


def test_each_result_of_a_call_is_a_piece() -> None:
    before = """
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%w: f32[8] {tp:R} = parameter("w")
%layer_norm: (f32[4, 8] {tp:R}, f32[4, 1] {tp:R}, f32[4, 1] {tp:R}) = native_layer_norm(%x, [8], %w, None, 1e-05)
%getitem: f32[4, 8] {tp:R} = getitem(%layer_norm, 0)
%getitem_1: f32[4, 1] {tp:R} = getitem(%layer_norm, 2)
return output("0") %getitem, output("1") %getitem_1
"""
    assert_expected_inline(rewrite(Decompose(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%w: f32[8] {tp:R} = parameter("w")
%var_mean: (f32[4, 1], f32[4, 1]) = var_mean.correction(%x, [1], correction=0, keepdim=True)
%getitem_2: f32[4, 1] = getitem(%var_mean, 0)
%getitem_3: f32[4, 1] = getitem(%var_mean, 1)
%add: f32[4, 1] = add.Tensor(%getitem_2, 1e-05)
%rsqrt: f32[4, 1] {tp:R} = rsqrt(%add)
%sub: f32[4, 8] = sub.Tensor(%x, %getitem_3)
%mul: f32[4, 8] = mul.Tensor(%sub, %rsqrt)
%mul_1: f32[4, 8] {tp:R} = mul.Tensor(%mul, %w)
return output("0") %mul_1, output("1") %rsqrt
""")


def test_pieces_of_a_call_that_is_made_again_are_made_again() -> None:
    before = """
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%relu: f32[4, 8] {tp:R} recompute = hardtanh(%x, 0.0, 6.0)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Decompose(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%clamp_min: f32[4, 8] recompute = clamp_min(%x, 0.0)
%clamp_max: f32[4, 8] {tp:R} recompute = clamp_max(%clamp_min, 6.0)
return output("output") %clamp_max
""")


def test_a_call_that_has_a_kernel_stays() -> None:
    before = """
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%relu: f32[4, 8] {tp:R} = relu(%x)
return output("output") %relu
"""
    assert_declines(Decompose(), before)
