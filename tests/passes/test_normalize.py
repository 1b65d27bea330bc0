"""One form per meaning: each rule of `normalize` on the smallest graph that shows it, and on one that it leaves alone."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.normalize import Normalize
from tests.passes.rewrite import assert_declines, assert_same_values, rewrite


def test_an_alias_and_a_detached_value_are_the_value() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%alias: f32[4, 8] = alias(%x)
%detach: f32[4, 8] = detach(%alias)
%relu: f32[4, 8] = relu(%detach)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%relu: f32[4, 8] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_conversion_to_the_dtype_that_it_has_is_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%same: f32[4, 8] = prims.convert_element_type(%x, f32)
%relu: f32[4, 8] = relu(%same)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%relu: f32[4, 8] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_conversion_to_another_dtype_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%convert_element_type: bf16[4, 8] = prims.convert_element_type(%x, bf16)
return output("output") %convert_element_type
"""
    assert_declines(Normalize(), before)


def test_a_view_to_the_shape_that_it_has_is_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%view: f32[4, 8] = view(%x, [4, 8])
%relu: f32[4, 8] = relu(%view)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%relu: f32[4, 8] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_slice_of_all_rows_is_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%slice_1: f32[4, 8] = slice.Tensor(%x, 0, 0, 4)
%relu: f32[4, 8] = relu(%slice_1)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%relu: f32[4, 8] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_slice_of_some_rows_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%slice_1: f32[3, 8] = slice.Tensor(%x, 0, 0, 3)
return output("output") %slice_1
"""
    assert_declines(Normalize(), before)


def test_a_clone_is_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%clone: f32[4, 8] = clone(%x)
%relu: f32[4, 8] = relu(%clone)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%relu: f32[4, 8] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_clone_that_is_returned_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%clone: f32[4, 8] = clone(%x)
return output("output") %clone
"""
    assert_declines(Normalize(), before)


def test_a_clone_that_changes_strides_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%permute: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%clone: f32[8, 4] = clone(%permute, memory_format=torch.contiguous_format)
%view: f32[32] = view(%clone, [32])
return output("output") %view
"""
    assert_declines(Normalize(), before)


def test_a_reshape_is_a_view() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%reshape: f32[24] = reshape(%x, [24])
%_unsafe_view: f32[8, 3] = _unsafe_view(%x, [8, 3])
return output("0") %reshape, output("1") %_unsafe_view
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%view: f32[24] = view(%x, [24])
%view_1: f32[8, 3] = view(%x, [8, 3])
return output("0") %view, output("1") %view_1
""")
    assert_same_values(Normalize(), before)


def test_a_view_of_a_view_is_one() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%view: f32[24] = view(%x, [24])
%view_1: f32[8, 3] = view(%view, [8, 3])
return output("output") %view_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%view_2: f32[8, 3] = view(%x, [8, 3])
return output("output") %view_2
""")
    assert_same_values(Normalize(), before)


def test_views_back_to_the_shape_that_it_had_are_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%view: f32[24] = view(%x, [24])
%view_1: f32[4, 6] = view(%view, [4, 6])
%relu: f32[4, 6] = relu(%view_1)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%relu: f32[4, 6] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_reshape_that_strides_forbid_is_a_view_of_a_copy() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%permute: f32[6, 4]<1, 6> = permute(%x, [1, 0])
%reshape: f32[24] = reshape(%permute, [24])
return output("output") %reshape
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%permute: f32[6, 4]<1, 6> = permute(%x, [1, 0])
%clone: f32[6, 4] = clone(%permute, memory_format=torch.contiguous_format)
%view: f32[24] = view(%clone, [24])
return output("output") %view
""")
    assert_same_values(Normalize(), before)


def test_a_transpose_is_a_permute() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6, 8] = input("x")
%w: f32[3, 5] = input("w")
%transpose: f32[4, 8, 6]<48, 1, 8> = transpose.int(%x, 1, -1)
%t: f32[5, 3]<1, 5> = t(%w)
return output("0") %transpose, output("1") %t
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6, 8] = input("x")
%w: f32[3, 5] = input("w")
%permute: f32[4, 8, 6]<48, 1, 8> = permute(%x, [0, 2, 1])
%permute_1: f32[5, 3]<1, 5> = permute(%w, [1, 0])
return output("0") %permute, output("1") %permute_1
""")
    assert_same_values(Normalize(), before)


def test_a_permute_of_a_permute_is_one() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6, 8] = input("x")
%permute: f32[6, 8, 4]<8, 1, 48> = permute(%x, [1, 2, 0])
%transpose: f32[8, 6, 4]<1, 8, 48> = transpose.int(%permute, 0, 1)
return output("output") %transpose
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6, 8] = input("x")
%permute_1: f32[8, 6, 4]<1, 8, 48> = permute(%x, [2, 1, 0])
return output("output") %permute_1
""")
    assert_same_values(Normalize(), before)


def test_permutes_that_undo_each_other_are_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%t: f32[6, 4]<1, 6> = t(%x)
%t_1: f32[4, 6] = t(%t)
%relu: f32[4, 6] = relu(%t_1)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%relu: f32[4, 6] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_single_view_and_a_single_permute_stay() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%view: f32[24] = view(%x, [24])
%permute: f32[6, 4]<1, 6> = permute(%x, [1, 0])
return output("0") %view, output("1") %permute
"""
    assert_declines(Normalize(), before)


def test_an_addmm_is_a_product_and_a_sum() -> None:
    before = """
mesh tp=2
stage CAPTURED
%b: f32[6] = parameter("b")
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%addmm: f32[4, 6] = addmm(%b, %x, %w)
return output("output") %addmm
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%b: f32[6] = parameter("b")
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%mm: f32[4, 6] = mm(%x, %w)
%add: f32[4, 6] = add.Tensor(%mm, %b)
return output("output") %add
""")
    assert_same_values(Normalize(), before)


def test_a_scaled_addmm_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%b: f32[6] = parameter("b")
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%addmm: f32[4, 6] = addmm(%b, %x, %w, alpha=2)
return output("output") %addmm
"""
    assert_declines(Normalize(), before)


def test_a_mean_of_a_dim_is_a_sum_over_its_length() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%mean: f32[4, 1] = mean.dim(%x, [-1], True)
return output("output") %mean
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%sum_1: f32[4, 1] = sum.dim_IntList(%x, [1], True)
%div: f32[4, 1] = div.Tensor(%sum_1, 8)
return output("output") %div
""")
    assert_same_values(Normalize(), before)


def test_a_mean_of_all_is_a_sum_over_the_count_of_entries() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%mean: f32[] = mean(%x)
return output("output") %mean
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 8] = input("x")
%sum_1: f32[] = sum.dim_IntList(%x, [0, 1], False)
%div: f32[] = div.Tensor(%sum_1, 32)
return output("output") %div
""")
    assert_same_values(Normalize(), before)


def test_a_mean_in_another_dtype_sums_in_that_dtype() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: bf16[4, 8] = input("x")
%mean: f32[4] = mean.dim(%x, [1], dtype=f32)
return output("output") %mean
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: bf16[4, 8] = input("x")
%sum_1: f32[4] = sum.dim_IntList(%x, [1], False, dtype=f32)
%div: f32[4] = div.Tensor(%sum_1, 8)
return output("output") %div
""")
    assert_same_values(Normalize(), before)


def test_parts_of_a_split_are_slices() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 7] = input("x")
%split: (f32[4, 3]<7, 1>, f32[4, 3]<7, 1>, f32[4, 1]<7, 1>) = split.Tensor(%x, 3, -1)
%getitem: f32[4, 3]<7, 1> = getitem(%split, 0)
%getitem_1: f32[4, 1]<7, 1> = getitem(%split, 2)
return output("0") %getitem, output("1") %getitem_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 7] = input("x")
%slice_1: f32[4, 3]<7, 1> = slice.Tensor(%x, 1, 0, 3)
%slice_2: f32[4, 1]<7, 1> = slice.Tensor(%x, 1, 6, 7)
return output("0") %slice_1, output("1") %slice_2
""")
    assert_same_values(Normalize(), before)


def test_parts_of_a_split_by_sizes_are_slices() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[6, 4] = input("x")
%split: (f32[1, 4], f32[5, 4]) = split_with_sizes(%x, [1, 5])
%getitem: f32[1, 4] = getitem(%split, 0)
%getitem_1: f32[5, 4] = getitem(%split, 1)
return output("0") %getitem, output("1") %getitem_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[6, 4] = input("x")
%slice_1: f32[1, 4] = slice.Tensor(%x, 0, 0, 1)
%slice_2: f32[5, 4] = slice.Tensor(%x, 0, 1, 6)
return output("0") %slice_1, output("1") %slice_2
""")
    assert_same_values(Normalize(), before)


def test_items_of_an_unbind_are_selects() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[2, 4, 6] = input("x")
%unbind: (f32[4, 6], f32[4, 6]) = unbind.int(%x)
%getitem: f32[4, 6] = getitem(%unbind, 1)
return output("output") %getitem
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[2, 4, 6] = input("x")
%select: f32[4, 6] = select.int(%x, 0, 1)
return output("output") %select
""")
    assert_same_values(Normalize(), before)


def test_a_concatenation_loses_parts_without_elements() -> None:
    before = """
mesh tp=2
stage CAPTURED
%empty: f32[0] = buffer("empty")
%x: f32[4, 8] = input("x")
%one: f32[4, 8] = cat([%empty, %x], -2)
%two: f32[8, 8] = cat([%empty, %x, %one], 0)
return output("output") %two
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%empty: f32[0] = buffer("empty")
%x: f32[4, 8] = input("x")
%cat: f32[8, 8] = cat([%x, %x], 0)
return output("output") %cat
""")
    assert_same_values(Normalize(), before)


def test_a_concatenation_of_one_part_in_another_order_in_memory_is_a_copy() -> None:
    before = """
mesh tp=2
stage CAPTURED
%empty: f32[0] = buffer("empty")
%x: f32[4, 8] = input("x")
%turned: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%cat: f32[8, 4] = cat([%empty, %turned])
%view: f32[32] = view(%cat, [32])
return output("output") %view
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%empty: f32[0] = buffer("empty")
%x: f32[4, 8] = input("x")
%turned: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%clone: f32[8, 4] = clone(%turned, memory_format=torch.contiguous_format)
%view: f32[32] = view(%clone, [32])
return output("output") %view
""")
    assert_same_values(Normalize(), before)


def test_a_split_that_is_used_whole_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[6, 4] = input("x")
%split: (f32[3, 4], f32[3, 4]) = split.Tensor(%x, 3)
%cat: f32[3, 8] = cat(%split, 1)
return output("output") %cat
"""
    assert_declines(Normalize(), before)


def test_filled_tensors_are_full() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%zeros_like: f32[4, 6] = zeros_like(%x)
%ones: f32[6] = ones([6])
%full_like: f32[4, 6] = full_like(%x, 2.5)
%new_zeros: f32[3, 5] = new_zeros(%x, [3, 5])
%without_memory: f32[3, 6] = _efficientzerotensor([3, 6])
return output("0") %zeros_like, output("1") %ones, output("2") %full_like, output("3") %new_zeros, output("4") %without_memory
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%full: f32[4, 6] = full([4, 6], 0, dtype=f32, device=device(cpu), pin_memory=False)
%full_1: f32[6] = full([6], 1, dtype=f32, device=device(cpu), pin_memory=False)
%full_2: f32[4, 6] = full([4, 6], 2.5, dtype=f32, device=device(cpu), pin_memory=False)
%full_3: f32[3, 5] = full([3, 5], 0, dtype=f32, device=device(cpu), pin_memory=False)
%full_4: f32[3, 6] = full([3, 6], 0, dtype=f32, device=device(cpu), pin_memory=False)
return output("0") %full, output("1") %full_1, output("2") %full_2, output("3") %full_3, output("4") %full_4
""")
    assert_same_values(Normalize(), before)


def test_a_filled_tensor_with_other_strides_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%permute: f32[6, 4]<1, 6> = permute(%x, [1, 0])
%zeros_like: f32[6, 4]<1, 6> = zeros_like(%permute)
return output("output") %zeros_like
"""
    assert_declines(Normalize(), before)


def test_statistics_of_a_batch_are_sums() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%var_mean: (f32[1, 6], f32[1, 6]) = var_mean.correction(%x, [0], correction=0, keepdim=True)
%getitem: f32[1, 6] = getitem(%var_mean, 0)
%getitem_1: f32[1, 6] = getitem(%var_mean, 1)
return output("var") %getitem, output("mean") %getitem_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%sum_1: f32[1, 6] = sum.dim_IntList(%x, [0], True)
%div: f32[1, 6] = div.Tensor(%sum_1, 4)
%sub: f32[4, 6] = sub.Tensor(%x, %div)
%mul: f32[4, 6] = mul.Tensor(%sub, %sub)
%sum_2: f32[1, 6] = sum.dim_IntList(%mul, [0], True)
%div_1: f32[1, 6] = div.Tensor(%sum_2, 4)
return output("var") %div_1, output("mean") %div
""")
    assert_same_values(Normalize(), before)


def test_statistics_of_a_batch_without_its_dim_are_sums() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6, 3] = input("x")
%var_mean: (f32[6], f32[6]) = var_mean.correction(%x, [0, 2])
%getitem: f32[6] = getitem(%var_mean, 0)
%getitem_1: f32[6] = getitem(%var_mean, 1)
return output("var") %getitem, output("mean") %getitem_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6, 3] = input("x")
%sum_1: f32[1, 6, 1] = sum.dim_IntList(%x, [0, 2], True)
%div: f32[1, 6, 1] = div.Tensor(%sum_1, 12)
%sub: f32[4, 6, 3] = sub.Tensor(%x, %div)
%mul: f32[4, 6, 3] = mul.Tensor(%sub, %sub)
%sum_2: f32[6] = sum.dim_IntList(%mul, [0, 2], False)
%div_1: f32[6] = div.Tensor(%sum_2, 11)
%view: f32[6] = view(%div, [6])
return output("var") %div_1, output("mean") %view
""")
    assert_same_values(Normalize(), before)


def test_statistics_of_features_stay() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%var_mean: (f32[4, 1], f32[4, 1]) = var_mean.correction(%x, [1], correction=0, keepdim=True)
%getitem: f32[4, 1] = getitem(%var_mean, 0)
return output("output") %getitem
"""
    assert_declines(Normalize(), before)


def test_the_sum_of_rows_with_one_entry_each_is_the_entries() -> None:
    before = """
mesh tp=2
stage CAPTURED
%index: i64[4, 1] = input("index")
%factor: f32[4, 1] = input("factor")
%full: f32[4, 6] = full([4, 6], 0, dtype=f32, device="cpu", pin_memory=False)
%scatter: f32[4, 6] = scatter.value(%full, 1, %index, -1.0)
%mul: f32[4, 6] = mul.Tensor(%scatter, %factor)
%sum_1: f32[4, 1] = sum.dim_IntList(%mul, [1], True)
return output("output") %sum_1
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%index: i64[4, 1] = input("index")
%factor: f32[4, 1] = input("factor")
%mul_1: f32[4, 1] = mul.Tensor(%factor, -1.0)
return output("output") %mul_1
""")
    assert_same_values(Normalize(), before)


def test_the_sum_of_rows_that_are_filled_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%index: i64[4, 1] = input("index")
%factor: f32[4, 1] = input("factor")
%full: f32[4, 6] = full([4, 6], 1, dtype=f32, device="cpu", pin_memory=False)
%scatter: f32[4, 6] = scatter.value(%full, 1, %index, -1.0)
%mul: f32[4, 6] = mul.Tensor(%scatter, %factor)
%sum_1: f32[4, 1] = sum.dim_IntList(%mul, [1], True)
return output("output") %sum_1
"""
    assert_declines(Normalize(), before)


def test_the_sum_of_columns_of_such_rows_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%index: i64[4, 1] = input("index")
%factor: f32[4, 1] = input("factor")
%full: f32[4, 6] = full([4, 6], 0, dtype=f32, device="cpu", pin_memory=False)
%scatter: f32[4, 6] = scatter.value(%full, 1, %index, -1.0)
%mul: f32[4, 6] = mul.Tensor(%scatter, %factor)
%sum_1: f32[1, 6] = sum.dim_IntList(%mul, [0], True)
return output("output") %sum_1
"""
    assert_declines(Normalize(), before)


def test_the_sum_of_such_rows_without_their_dim_stays() -> None:
    before = """
mesh tp=2
stage CAPTURED
%index: i64[4, 1] = input("index")
%factor: f32[4, 1] = input("factor")
%full: f32[4, 6] = full([4, 6], 0, dtype=f32, device="cpu", pin_memory=False)
%scatter: f32[4, 6] = scatter.value(%full, 1, %index, -1.0)
%mul: f32[4, 6] = mul.Tensor(%scatter, %factor)
%sum_1: f32[4] = sum.dim_IntList(%mul, [1], False)
return output("output") %sum_1
"""
    assert_declines(Normalize(), before)


def test_equal_calls_are_one() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%relu: f32[4, 6] = relu(%x)
%relu_1: f32[4, 6] = relu(%x)
%mul: f32[4, 6] = mul.Tensor(%relu, %relu_1)
return output("output") %mul
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%relu: f32[4, 6] = relu(%x)
%mul: f32[4, 6] = mul.Tensor(%relu, %relu)
return output("output") %mul
""")
    assert_same_values(Normalize(), before)


def test_calls_that_become_equal_are_one() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%reshape: f32[24] = reshape(%x, [24])
%view: f32[24] = view(%x, [24])
%add: f32[24] = add.Tensor(%reshape, %view)
return output("output") %add
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%view_1: f32[24] = view(%x, [24])
%add: f32[24] = add.Tensor(%view_1, %view_1)
return output("output") %add
""")
    assert_same_values(Normalize(), before)


def test_calls_with_other_arguments_stay_two() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%mul: f32[4, 6] = mul.Tensor(%x, 2)
%mul_1: f32[4, 6] = mul.Tensor(%x, 2.0)
%sub: f32[4, 6] = sub.Tensor(%mul, %mul_1)
return output("output") %sub
"""
    assert_declines(Normalize(), before)


def test_equal_draws_of_random_numbers_stay_two() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%bernoulli: f32[4, 6] = bernoulli.p(%x, 0.5)
%bernoulli_1: f32[4, 6] = bernoulli.p(%x, 0.5)
%sub: f32[4, 6] = sub.Tensor(%bernoulli, %bernoulli_1)
return output("output") %sub
"""
    assert_declines(Normalize(), before)


def test_a_call_that_nobody_uses_is_gone_with_what_it_needed() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%exp: f32[4, 6] = exp(%x)
%sum_1: f32[4] = sum.dim_IntList(%exp, [1])
%relu: f32[4, 6] = relu(%x)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[4, 6] = input("x")
%relu: f32[4, 6] = relu(%x)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_view_by_strides_is_slices_and_a_permutation() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[8, 6] = input("x")
%as_strided: f32[3, 4]<1, 12> = as_strided(%x, [3, 4], [1, 12], 3)
%relu: f32[3, 4]<1, 3> = relu(%as_strided)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[8, 6] = input("x")
%view: f32[4, 12] = view(%x, [4, 12])
%slice_1: f32[4, 3]<12, 1> = slice.Tensor(%view, 1, 3, 6)
%permute: f32[3, 4]<1, 12> = permute(%slice_1, [1, 0])
%relu: f32[3, 4]<1, 3> = relu(%permute)
return output("output") %relu
""")
    assert_same_values(Normalize(), before)


def test_a_view_by_strides_of_the_same_shape_is_gone() -> None:
    before = """
mesh tp=2
stage CAPTURED
%x: f32[8, 6] = input("x")
%relu: f32[8, 6] = relu(%x)
%as_strided: f32[8, 6] = as_strided(%relu, [8, 6], [6, 1])
%neg: f32[8, 6] = neg(%as_strided)
return output("output") %neg
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh tp=2
stage CAPTURED
%x: f32[8, 6] = input("x")
%relu: f32[8, 6] = relu(%x)
%neg: f32[8, 6] = neg(%relu)
return output("output") %neg
""")


def test_a_diagonal_by_strides_stays() -> None:
    assert_declines(Normalize(), """
mesh tp=2
stage CAPTURED
%x: f32[6, 6] = input("x")
%as_strided: f32[6]<7> = as_strided(%x, [6], [7])
%relu: f32[6] = relu(%as_strided)
return output("output") %relu
""")


def test_a_bias_is_added_to_a_convolution_and_its_gradient_summed_apart() -> None:
    before = """
mesh tp=2
stage CAPTURED
%b: f32[6] = parameter("b")
%w: f32[6, 4, 3] = parameter("w")
%x: f32[2, 4, 8] = input("x")
%g: f32[2, 6, 6] = input("g")
%convolution: f32[2, 6, 6] = convolution(%x, %w, %b, [1], [0], [1], False, [0], 1)
%back: (None, f32[6, 4, 3], f32[6]) = convolution_backward(%g, %x, %w, [6], [1], [0], [1], False, [0], 1, [False, True, True])
%getitem: f32[6, 4, 3] = getitem(%back, 1)
%getitem_1: f32[6] = getitem(%back, 2)
return output("output") %convolution, output("w") %getitem, output("b") %getitem_1
"""
    after = rewrite(Normalize(), before)
    assert "convolution(%x, %w, None, " in after and "add.Tensor(%convolution_1, %view)" in after
    assert "[False, True, False])" in after and "sum.dim_IntList(%g, [0, 2])" in after
    assert_same_values(Normalize(), before)


def test_bags_of_one_length_are_a_lookup_and_a_sum() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[5, 8] = parameter("w")
%x: i64[4, 3] = input("x")
%grad: f32[4, 8] = tangent("output")
%iota: i64[4] = prims.iota(4, start=0, step=3, dtype=i64, device=device(cpu), requires_grad=False)
%view: i64[12] = view(%x, [12])
%_embedding_bag: (f32[4, 8], i64[12], i64[4], i64[4]) = _embedding_bag(%w, %view, %iota, False, 1)
%getitem: f32[4, 8] = getitem(%_embedding_bag, 0)
%a: i64[12] = getitem(%_embedding_bag, 1)
%b: i64[4] = getitem(%_embedding_bag, 2)
%c: i64[4] = getitem(%_embedding_bag, 3)
%g: f32[5, 8] = _embedding_bag_backward(%grad, %view, %iota, %a, %b, %c, 5, False, 1, False, None)
return output("output") %getitem, gradient("w") %g
"""
    assert_expected_inline(rewrite(Normalize(), before), """\
mesh dp=2
stage CAPTURED
%w: f32[5, 8] = parameter("w")
%x: i64[4, 3] = input("x")
%grad: f32[4, 8] = tangent("output")
%embedding: f32[4, 3, 8] = embedding(%w, %x)
%sum_1: f32[4, 8] = sum.dim_IntList(%embedding, [1], False)
%div: f32[4, 8] = div.Tensor(%sum_1, 3)
%div_1: f32[4, 8] = div.Tensor(%grad, 3)
%unsqueeze: f32[4, 1, 8] = unsqueeze(%div_1, 1)
%expand: f32[4, 3, 8]<8, 0, 1> = expand(%unsqueeze, [4, 3, 8])
%embedding_dense_backward: f32[5, 8] = embedding_dense_backward(%expand, %x, 5, -1, False)
return output("output") %div, gradient("w") %embedding_dense_backward
""")
    assert_same_values(Normalize(), before)


def test_weighted_bags_with_padding_are_a_lookup_and_a_sum() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[5, 8] = parameter("w")
%x: i64[12] = input("x")
%weights: f32[12] = input("weights")
%grad: f32[4, 8] = tangent("output")
%iota: i64[4] = prims.iota(4, start=0, step=3, dtype=i64, device=device(cpu), requires_grad=False)
%_embedding_bag: (f32[4, 8], i64[12], i64[4], i64[4]) = _embedding_bag(%w, %x, %iota, False, 0, False, %weights, False, 1)
%getitem: f32[4, 8] = getitem(%_embedding_bag, 0)
%a: i64[12] = getitem(%_embedding_bag, 1)
%b: i64[4] = getitem(%_embedding_bag, 2)
%c: i64[4] = getitem(%_embedding_bag, 3)
%g: f32[5, 8] = _embedding_bag_backward(%grad, %x, %iota, %a, %b, %c, 5, False, 0, False, %weights, 1)
%for_weights: f32[12] = _embedding_bag_per_sample_weights_backward(%grad, %w, %x, %iota, %a, 0, 1)
return output("output") %getitem, gradient("w") %g, gradient("input:weights") %for_weights
"""
    assert "embedding_bag" not in rewrite(Normalize(), before)
    assert_same_values(Normalize(), before)


def test_averaged_bags_with_padding_divide_by_what_counts() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[5, 8] = parameter("w")
%x: i64[12] = input("x")
%grad: f32[4, 8] = tangent("output")
%iota: i64[4] = prims.iota(4, start=0, step=3, dtype=i64, device=device(cpu), requires_grad=False)
%_embedding_bag: (f32[4, 8], i64[12], i64[4], i64[4]) = _embedding_bag(%w, %x, %iota, False, 1, False, None, False, 1)
%getitem: f32[4, 8] = getitem(%_embedding_bag, 0)
%a: i64[12] = getitem(%_embedding_bag, 1)
%b: i64[4] = getitem(%_embedding_bag, 2)
%c: i64[4] = getitem(%_embedding_bag, 3)
%g: f32[5, 8] = _embedding_bag_backward(%grad, %x, %iota, %a, %b, %c, 5, False, 1, False, None, 1)
return output("output") %getitem, gradient("w") %g
"""
    assert "embedding_bag" not in rewrite(Normalize(), before)
    assert_same_values(Normalize(), before)


def test_bags_of_several_lengths_and_maxima_stay() -> None:
    before = """
mesh dp=2
stage CAPTURED
%w: f32[5, 8] = parameter("w")
%x: i64[12] = input("x")
%offsets: i64[4] = input("offsets")
%iota: i64[4] = prims.iota(4, start=0, step=3, dtype=i64, device=device(cpu), requires_grad=False)
%_embedding_bag: (f32[4, 8], i64[12], i64[4], i64[4]) = _embedding_bag(%w, %x, %offsets, False, 0)
%getitem: f32[4, 8] = getitem(%_embedding_bag, 0)
%_embedding_bag_1: (f32[4, 8], i64[12], i64[4], i64[4, 8]) = _embedding_bag(%w, %x, %iota, False, 2)
%getitem_1: f32[4, 8] = getitem(%_embedding_bag_1, 0)
return output("0") %getitem, output("1") %getitem_1
"""
    assert_declines(Normalize(), before)


def projection(*parts: int) -> str:
    """Return a fused projection of 8 columns, with a bias, its slices, and its gradients."""
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    cut = [
        f"%p{i}: f32[2, 3, {part}]<24, 8, 1> = slice.Tensor(%view, 2, {end - part}, {end})\n"
        f"%a{i}: f32[2, 3, {part}] = mul.Tensor(%p{i}, {i + 2})\n"
        f'%g{i}: f32[2, 3, {part}] = tangent("{i}")'
        for i, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]
    inputs = [line for lines in cut for line in lines.split("\n") if "tangent" in line]
    calls = [line for lines in cut for line in lines.split("\n") if "tangent" not in line]
    joined = ", ".join(f"%g{i}" for i in range(len(parts)))
    outputs = ", ".join(f'output("{i}") %a{i}' for i in range(len(parts)))
    return "\n".join(
        (
            'mesh tp=2\nstage CAPTURED\n%w: f32[8, 4] = parameter("w")\n%b: f32[8] = parameter("b")',
            '%x: f32[6, 4] = input("x")',
            *inputs,
            "%permute: f32[4, 8]<1, 4> = permute(%w, [1, 0])",
            "%mm: f32[6, 8] = mm(%x, %permute)",
            "%add: f32[6, 8] = add.Tensor(%mm, %b)",
            "%view: f32[2, 3, 8] = view(%add, [2, 3, 8])",
            *calls,
            f"%cat: f32[2, 3, 8] = cat([{joined}], 2)",
            "%view_1: f32[6, 8] = view(%cat, [6, 8])",
            "%permute_1: f32[8, 6]<1, 8> = permute(%view_1, [1, 0])",
            "%gw: f32[8, 4] = mm(%permute_1, %x)",
            "%sum_1: f32[8] = sum.dim_IntList(%view_1, [0], False)",
            "%gx: f32[6, 4] = mm(%view_1, %w)",
            f'return {outputs}, gradient("w") %gw, gradient("b") %sum_1, gradient("x") %gx\n',
        )
    )


def test_unequal_parts_of_a_projection_are_products_of_their_own() -> None:
    before = projection(4, 2, 2)
    remark = "4 + 2 + 2 columns of a product become products of their own, for an axis of 2 to shard each by itself"
    assert_expected_inline(rewrite(Normalize(parts=2), before, remark), """\
mesh tp=2
stage CAPTURED
%w: f32[8, 4] = parameter("w")
%b: f32[8] = parameter("b")
%x: f32[6, 4] = input("x")
%g0: f32[2, 3, 4] = tangent("0")
%g1: f32[2, 3, 2] = tangent("1")
%g2: f32[2, 3, 2] = tangent("2")
%slice_1: f32[4, 4] = slice.Tensor(%w, 0, 0, 4)
%slice_2: f32[2, 4] = slice.Tensor(%w, 0, 4, 6)
%slice_3: f32[2, 4] = slice.Tensor(%w, 0, 6, 8)
%permute_2: f32[4, 4]<1, 4> = permute(%slice_1, [1, 0])
%permute_3: f32[4, 2]<1, 4> = permute(%slice_2, [1, 0])
%permute_4: f32[4, 2]<1, 4> = permute(%slice_3, [1, 0])
%mm_1: f32[6, 4] = mm(%x, %permute_2)
%mm_2: f32[6, 2] = mm(%x, %permute_3)
%mm_3: f32[6, 2] = mm(%x, %permute_4)
%slice_4: f32[4] = slice.Tensor(%b, 0, 0, 4)
%slice_5: f32[2] = slice.Tensor(%b, 0, 4, 6)
%slice_6: f32[2] = slice.Tensor(%b, 0, 6, 8)
%add_1: f32[6, 4] = add.Tensor(%mm_1, %slice_4)
%add_2: f32[6, 2] = add.Tensor(%mm_2, %slice_5)
%add_3: f32[6, 2] = add.Tensor(%mm_3, %slice_6)
%view_2: f32[2, 3, 4] = view(%add_1, [2, 3, 4])
%view_3: f32[2, 3, 2] = view(%add_2, [2, 3, 2])
%view_4: f32[2, 3, 2] = view(%add_3, [2, 3, 2])
%a0: f32[2, 3, 4] = mul.Tensor(%view_2, 2)
%a1: f32[2, 3, 2] = mul.Tensor(%view_3, 3)
%a2: f32[2, 3, 2] = mul.Tensor(%view_4, 4)
%view_5: f32[6, 4] = view(%g0, [6, 4])
%view_6: f32[6, 2] = view(%g1, [6, 2])
%view_7: f32[6, 2] = view(%g2, [6, 2])
%permute_5: f32[4, 6]<1, 4> = permute(%view_5, [1, 0])
%permute_6: f32[2, 6]<1, 2> = permute(%view_6, [1, 0])
%permute_7: f32[2, 6]<1, 2> = permute(%view_7, [1, 0])
%mm_4: f32[4, 4] = mm(%permute_5, %x)
%mm_5: f32[2, 4] = mm(%permute_6, %x)
%mm_6: f32[2, 4] = mm(%permute_7, %x)
%sum_2: f32[4] = sum.dim_IntList(%view_5, [0], False)
%sum_3: f32[2] = sum.dim_IntList(%view_6, [0], False)
%sum_4: f32[2] = sum.dim_IntList(%view_7, [0], False)
%mm_7: f32[6, 4] = mm(%view_5, %slice_1)
%mm_8: f32[6, 4] = mm(%view_6, %slice_2)
%mm_9: f32[6, 4] = mm(%view_7, %slice_3)
%add_4: f32[6, 4] = add.Tensor(%mm_7, %mm_8)
%add_5: f32[6, 4] = add.Tensor(%add_4, %mm_9)
%cat_1: f32[8, 4] = cat([%mm_4, %mm_5, %mm_6], 0)
%cat_2: f32[8] = cat([%sum_2, %sum_3, %sum_4], 0)
return output("0") %a0,
       output("1") %a1,
       output("2") %a2,
       gradient("w") %cat_1,
       gradient("b") %cat_2,
       gradient("x") %add_5
""")
    assert_same_values(Normalize(parts=2), before)
    assert_declines(Normalize(), before)


def test_equal_parts_of_a_projection_stay_one_product() -> None:
    assert_declines(Normalize(parts=2), projection(4, 4))


def test_a_projection_stays_one_product_if_it_has_a_whole_use() -> None:
    piece = "%p1: f32[2, 3, 2]<24, 8, 1> = slice.Tensor"
    before = projection(4, 2, 2).replace(f"{piece}(%view,", f"%flip: f32[2, 3, 8] = flip(%view, [2])\n{piece}(%flip,")
    assert_declines(Normalize(parts=2), before)


def test_a_projection_stays_one_product_if_no_part_divides() -> None:
    assert_declines(Normalize(parts=2), projection(5, 3))
