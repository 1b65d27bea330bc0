"""What each kind of call is on one device: placeholders, the steps of a reshard, local forms, and all others."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.localize import Localize
from tests.passes.rewrite import assert_declines, rewrite


def test_a_placeholder_has_the_shape_of_one_part() -> None:
    before = """
mesh dp=4,tp=2
stage COLLECTIVE
%w: f32[8, 6] {dp:S(0), tp:S(1)} = parameter("w")
%relu: f32[8, 6] {dp:S(0), tp:S(1)} = relu(%w)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh dp=4,tp=2
stage LOCAL
%w: f32[2, 3] {dp:S(0), tp:S(1)} = parameter("w")
%relu: f32[2, 3] {dp:S(0), tp:S(1)} = relu(%w)
return output("output") %relu
""")


def test_a_parameter_that_its_axis_does_not_divide_is_padded() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%w: f32[5, 8] {tp:S(0)} = parameter("w")
%all_gather: f32[5, 8] {tp:R} = all_gather(%w, ["tp"])
return output("output") %all_gather
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%w: f32[3, 8] {tp:S(0)} = parameter("w")
%all_gather_into_tensor: f32[6, 8] = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:tp=2:tp")
%wait_tensor: f32[6, 8] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%view_1: f32[1, 6, 8] = view(%wait_tensor, [1, 6, 8])
%slice_1: f32[1, 5, 8] = slice.Tensor(%view_1, 1, 0, 5)
%view_2: f32[5, 8] {tp:R} = view(%slice_1, [5, 8])
return output("output") %view_2
""")


def test_a_gather_of_rows_is_one_collective() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:S(0)} = input("x")
%all_gather: f32[8, 12] {tp:R} = all_gather(%x, ["tp"])
return output("output") %all_gather
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 12] {tp:S(0)} = input("x")
%all_gather_into_tensor: f32[8, 12] = _c10d_functional.all_gather_into_tensor(%x, 2, "autoshard:tp=2:tp")
%wait_tensor: f32[8, 12] {tp:R} = _c10d_functional.wait_tensor(%all_gather_into_tensor)
return output("output") %wait_tensor
""")


def test_complex_numbers_are_sent_as_pairs() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: c64[8, 12] {tp:S(0)} = input("x")
%all_gather: c64[8, 12] {tp:R} = all_gather(%x, ["tp"])
return output("output") %all_gather
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: c64[4, 12] {tp:S(0)} = input("x")
%view_as_real: f32[4, 12, 2] = view_as_real(%x)
%all_gather_into_tensor: f32[8, 12, 2] = _c10d_functional.all_gather_into_tensor(%view_as_real, 2, "autoshard:tp=2:tp")
%wait_tensor: f32[8, 12, 2] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%view_as_complex: c64[8, 12] {tp:R} = view_as_complex(%wait_tensor)
return output("output") %view_as_complex
""")


def test_a_gather_of_columns_puts_the_parts_side_by_side() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:S(1)} = input("x")
%all_gather: f32[8, 12] {tp:R} = all_gather(%x, ["tp"])
return output("output") %all_gather
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[8, 6] {tp:S(1)} = input("x")
%all_gather_into_tensor: f32[16, 6] = _c10d_functional.all_gather_into_tensor(%x, 2, "autoshard:tp=2:tp")
%wait_tensor: f32[16, 6] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%view: f32[2, 8, 6] = view(%wait_tensor, [2, 8, 6])
%permute: f32[8, 2, 6]<6, 48, 1> = permute(%view, [1, 0, 2])
%clone: f32[8, 2, 6] = clone(%permute, memory_format=torch.contiguous_format)
%view_1: f32[8, 12] {tp:R} = view(%clone, [8, 12])
return output("output") %view_1
""")


def test_a_gather_over_two_axes_is_of_their_group() -> None:
    before = """
mesh dp=2,tp=2
stage COLLECTIVE
%x: f32[8, 12] {dp:S(0/2), tp:S(0)} = input("x")
%all_gather: f32[8, 12] {dp:R, tp:R} = all_gather(%x, ["dp", "tp"])
return output("output") %all_gather
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh dp=2,tp=2
stage LOCAL
%x: f32[2, 12] {dp:S(0/2), tp:S(0)} = input("x")
%all_gather_into_tensor: f32[8, 12] = _c10d_functional.all_gather_into_tensor(%x, 4, "autoshard:dp=2,tp=2:dp.tp")
%wait_tensor: f32[8, 12] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
%view: f32[2, 2, 2, 12] = view(%wait_tensor, [2, 2, 2, 12])
%permute: f32[2, 2, 2, 12]<24, 48, 12, 1> = permute(%view, [1, 0, 2, 3])
%clone: f32[2, 2, 2, 12] = clone(%permute, memory_format=torch.contiguous_format)
%view_1: f32[8, 12] {dp:R, tp:R} = view(%clone, [8, 12])
return output("output") %view_1
""")


def test_a_sum_is_reduced_in_its_shape() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%all_reduce: f32[8, 12] {tp:R} = all_reduce(%sum_1, ["tp"])
return output("output") %all_reduce
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[2, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%all_reduce_1: f32[8, 12] = _c10d_functional.all_reduce(%sum_1, "sum", "autoshard:tp=2:tp")
%wait_tensor: f32[8, 12] {tp:R} = _c10d_functional.wait_tensor(%all_reduce_1)
return output("output") %wait_tensor
""")


def test_a_scatter_of_rows_is_one_collective() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reduce_scatter: f32[8, 12] {tp:S(0)} = reduce_scatter(%sum_1, ["tp"])
return output("output") %reduce_scatter
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[2, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%view_1: f32[2, 48] = view(%sum_1, [2, 48])
%reduce_scatter_tensor: f32[1, 48] = _c10d_functional.reduce_scatter_tensor(%view_1, "sum", 2, "autoshard:tp=2:tp")
%wait_tensor: f32[1, 48] = _c10d_functional.wait_tensor(%reduce_scatter_tensor)
%view_2: f32[4, 12] {tp:S(0)} = view(%wait_tensor, [4, 12])
return output("output") %view_2
""")


def test_a_scatter_of_columns_cuts_them_first() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%reduce_scatter: f32[8, 12] {tp:S(1)} = reduce_scatter(%sum_1, ["tp"])
return output("output") %reduce_scatter
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[2, 8, 12] {tp:S(0)} = input("x")
%sum_1: f32[8, 12] {tp:P(sum)} = sum.dim_IntList(%x, [0])
%view: f32[8, 2, 6] = view(%sum_1, [8, 2, 6])
%permute: f32[2, 8, 6]<6, 12, 1> = permute(%view, [1, 0, 2])
%clone: f32[2, 8, 6] = clone(%permute, memory_format=torch.contiguous_format)
%view_1: f32[2, 48] = view(%clone, [2, 48])
%reduce_scatter_tensor: f32[1, 48] = _c10d_functional.reduce_scatter_tensor(%view_1, "sum", 2, "autoshard:tp=2:tp")
%wait_tensor: f32[1, 48] = _c10d_functional.wait_tensor(%reduce_scatter_tensor)
%view_2: f32[8, 6] {tp:S(1)} = view(%wait_tensor, [8, 6])
return output("output") %view_2
""")


def test_an_exchange_cuts_one_dim_and_joins_the_other() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:S(0)} = input("x")
%all_to_all: f32[8, 12] {tp:S(1)} = all_to_all(%x, ["tp"])
return output("output") %all_to_all
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 12] {tp:S(0)} = input("x")
%view: f32[4, 2, 6] = view(%x, [4, 2, 6])
%permute: f32[2, 4, 6]<6, 12, 1> = permute(%view, [1, 0, 2])
%clone: f32[2, 4, 6] = clone(%permute, memory_format=torch.contiguous_format)
%view_1: f32[2, 24] = view(%clone, [2, 24])
%all_to_all_single: f32[2, 24] = _c10d_functional.all_to_all_single(%view_1, [1, 1], [1, 1], "autoshard:tp=2:tp")
%wait_tensor: f32[2, 24] = _c10d_functional.wait_tensor(%all_to_all_single)
%view_3: f32[8, 6] {tp:S(1)} = view(%wait_tensor, [8, 6])
return output("output") %view_3
""")


def test_a_part_is_taken_at_the_coordinate_of_the_rank() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:R} = input("x")
%take_part: f32[8, 12] {tp:S(0)} = take_part(%x, ["tp"])
return output("output") %take_part
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[8, 12] {tp:R} = input("x")
%coordinate_tp: i64[1] {tp:R} = coordinate("tp")
%view: f32[2, 4, 12] = view(%x, [2, 4, 12])
%index: f32[1, 4, 12] = index.Tensor(%view, [%coordinate_tp])
%view_2: f32[4, 12] {tp:S(0)} = view(%index, [4, 12])
return output("output") %view_2
""")


def test_a_term_is_the_value_on_the_first_rank_alone() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[8, 12] {tp:R} = input("x")
%take_term: f32[8, 12] {tp:P(sum)} = take_term(%x, ["tp"])
return output("output") %take_term
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[8, 12] {tp:R} = input("x")
%coordinate_tp: i64[1] {tp:R} = coordinate("tp")
%full: f32[] = full([], 0, dtype=f32, device=device(cpu), pin_memory=False)
%eq: b8[1] = eq.Scalar(%coordinate_tp, 0)
%view: b8[] = view(%eq, [])
%where: f32[8, 12] {tp:P(sum)} = where.self(%view, %x, %full)
return output("output") %where
""")


def test_a_view_has_the_shape_of_one_part() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 3, 8] {tp:S(0)} = input("x")
%view: f32[12, 8] {tp:S(0)} = view(%x, [12, 8])
return output("output") %view
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[2, 3, 8] {tp:S(0)} = input("x")
%view_1: f32[6, 8] {tp:S(0)} = view(%x, [6, 8])
return output("output") %view_1
""")


def test_a_tensor_is_filled_in_parts() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8] {tp:S(1)} = input("x")
%full: f32[4, 8] {tp:S(1)} = full([4, 8], 2.5)
%mul: f32[4, 8] {tp:S(1)} = mul.Tensor(%x, %full)
return output("output") %mul
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 4] {tp:S(1)} = input("x")
%full_1: f32[4, 4] {tp:S(1)} = full([4, 4], 2.5)
%mul: f32[4, 4] {tp:S(1)} = mul.Tensor(%x, %full_1)
return output("output") %mul
""")


def test_an_embedding_whose_rows_are_split_masks_those_of_other_ranks() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%w: f32[8, 6] {tp:S(0)} = parameter("w")
%tokens: i64[3] {tp:R} = input("tokens")
%embedding: f32[3, 6] {tp:P(sum)} = embedding(%w, %tokens)
%all_reduce: f32[3, 6] {tp:R} = all_reduce(%embedding, ["tp"])
return output("output") %all_reduce
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%w: f32[4, 6] {tp:S(0)} = parameter("w")
%tokens: i64[3] {tp:R} = input("tokens")
%coordinate_tp: i64[1] {tp:R} = coordinate("tp")
%lt: b8[3] = lt.Scalar(%tokens, 0)
%ge: b8[3] = ge.Scalar(%tokens, 8)
%bitwise_or: b8[3] = bitwise_or.Tensor(%lt, %ge)
%mul: i64[1] = mul.Tensor(%coordinate_tp, 4)
%sub: i64[3] = sub.Tensor(%tokens, %mul)
%lt_1: b8[3] = lt.Scalar(%sub, 0)
%ge_1: b8[3] = ge.Scalar(%sub, 4)
%bitwise_or_1: b8[3] = bitwise_or.Tensor(%lt_1, %ge_1)
%masked_fill: i64[3] = masked_fill.Scalar(%sub, %bitwise_or_1, 0)
%masked_fill_1: i64[3] = masked_fill.Scalar(%masked_fill, %bitwise_or, 5)
%embedding_1: f32[3, 6] = embedding(%w, %masked_fill_1)
%unsqueeze: b8[3, 1] = unsqueeze(%bitwise_or_1, -1)
%masked_fill_2: f32[3, 6] {tp:P(sum)} = masked_fill.Scalar(%embedding_1, %unsqueeze, 0)
%all_reduce_1: f32[3, 6] = _c10d_functional.all_reduce(%masked_fill_2, "sum", "autoshard:tp=2:tp")
%wait_tensor: f32[3, 6] {tp:R} = _c10d_functional.wait_tensor(%all_reduce_1)
return output("output") %wait_tensor
""")


def test_random_numbers_are_drawn_from_the_seed_of_the_step() -> None:
    after = rewrite(Localize(), """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8] {tp:S(0)} = input("x")
%bernoulli: f32[4, 8] {tp:S(0)} = bernoulli.p(%x, 0.5)
return output("output") %bernoulli
""")
    assert '= seed("step")' in after and '= coordinate("tp")' in after
    assert "bernoulli" not in after


def test_replicated_random_numbers_are_drawn_from_it_too() -> None:
    after = rewrite(Localize(), """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8] {tp:R} = input("x")
%bernoulli: f32[4, 8] {tp:R} = bernoulli.p(%x, 0.5)
return output("output") %bernoulli
""")
    assert '= seed("step")' in after and "= coordinate(" not in after
    assert "bernoulli" not in after


def test_a_call_without_a_local_form_stays_as_it_is() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%w: f32[8, 6] {tp:S(1)} = parameter("w")
%x: f32[4, 8] {tp:R} = input("x")
%mm: f32[4, 6] {tp:S(1)} = mm(%x, %w)
%relu: f32[4, 6] {tp:S(1)} = relu(%mm)
return output("output") %relu
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%w: f32[8, 3] {tp:S(1)} = parameter("w")
%x: f32[4, 8] {tp:R} = input("x")
%mm: f32[4, 3] {tp:S(1)} = mm(%x, %w)
%relu: f32[4, 3] {tp:S(1)} = relu(%mm)
return output("output") %relu
""")


def test_a_replicated_program_stays_as_it_is() -> None:
    before = """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8] {tp:R} = input("x")
%full: f32[4, 8] {tp:R} = full([4, 8], 2.5)
%mul: f32[4, 8] {tp:R} = mul.Tensor(%x, %full)
%view: f32[32] {tp:R} = view(%mul, [32])
return output("output") %view
"""
    assert_expected_inline(rewrite(Localize(), before), """\
mesh tp=2
stage LOCAL
%x: f32[4, 8] {tp:R} = input("x")
%full: f32[4, 8] {tp:R} = full([4, 8], 2.5)
%mul: f32[4, 8] {tp:R} = mul.Tensor(%x, %full)
%view_1: f32[32] {tp:R} = view(%mul, [32])
return output("output") %view_1
""")


def test_a_program_of_whole_tensors_is_not_changed() -> None:
    assert_declines(Localize(), """
mesh tp=2
stage COLLECTIVE
%x: f32[4, 8] {tp:R} = input("x")
%relu: f32[4, 8] {tp:R} = relu(%x)
return output("output") %relu
""")
