"""What `decompose` breaks up, and what it leaves whole."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.base import PassContext
from passes.decompose import Decompose
from passes.ir.text import format_graph, parse_graph
from passes.verify import verify


def decomposed(text: str) -> str:
    gm, mesh = parse_graph(text)
    Decompose().run(gm, PassContext(mesh))
    verify(gm, mesh)
    return format_graph(gm, mesh)


def test_pieces_stand_for_the_call_and_keep_what_it_was_made_for() -> None:
    before = """\
mesh dp=2
stage LOCAL
%x: f32[4, 8] {dp:R} = input("x")
%silu: f32[4, 8] {dp:R} recompute = silu(%x)      # | gate
return output("output") %silu
"""
    assert_expected_inline(decomposed(before), """\
mesh dp=2
stage LOCAL
%x: f32[4, 8] {dp:R} = input("x")
%neg: f32[4, 8] recompute = neg(%x)      # | gate
%exp: f32[4, 8] recompute = exp(%neg)      # | gate
%add: f32[4, 8] recompute = add.Tensor(%exp, 1)      # | gate
%div: f32[4, 8] {dp:R} recompute = div.Tensor(%x, %add)      # | gate
return output("output") %div
""")


def test_each_result_of_a_call_is_replaced_by_its_own() -> None:
    before = """\
mesh dp=2
stage LOCAL
%w: f32[8] {dp:R} = parameter("w")
%x: f32[4, 8] {dp:R} = input("x")
%norm: (f32[4, 8] {dp:R}, f32[4, 1] {dp:R}, f32[4, 1] {dp:R}) = native_layer_norm(%x, [8], %w, None, 1e-05)
%getitem: f32[4, 8] {dp:R} = getitem(%norm, 0)
%getitem_1: f32[4, 1] {dp:R} = getitem(%norm, 1)
return output("output") %getitem, output("mean") %getitem_1
"""
    assert_expected_inline(decomposed(before), """\
mesh dp=2
stage LOCAL
%w: f32[8] {dp:R} = parameter("w")
%x: f32[4, 8] {dp:R} = input("x")
%var_mean: (f32[4, 1], f32[4, 1]) = var_mean.correction(%x, [1], correction=0, keepdim=True)
%getitem_2: f32[4, 1] = getitem(%var_mean, 0)
%getitem_3: f32[4, 1] {dp:R} = getitem(%var_mean, 1)
%add: f32[4, 1] = add.Tensor(%getitem_2, 1e-05)
%rsqrt: f32[4, 1] = rsqrt(%add)
%sub: f32[4, 8] = sub.Tensor(%x, %getitem_3)
%mul: f32[4, 8] = mul.Tensor(%sub, %rsqrt)
%mul_1: f32[4, 8] {dp:R} = mul.Tensor(%mul, %w)
return output("output") %mul_1, output("mean") %getitem_3
""")


def test_a_call_that_the_backend_has_a_kernel_for_stays_whole() -> None:
    before = """\
mesh dp=2
stage LOCAL
%w: f32[8, 6] {dp:R} = parameter("w")
%x: f32[4, 8] {dp:R} = input("x")
%mm: f32[4, 6] {dp:R} = mm(%x, %w)
return output("output") %mm
"""
    assert decomposed(before) == before
