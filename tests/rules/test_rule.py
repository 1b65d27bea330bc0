"""Rows and how they are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import UserError
from passes.ir.call import call_of
from passes.ir.layout import Partial, R, Replicate, Shard
from passes.rules import Call, Rule, Space, Tensor, register, rule, rule_of
from passes.rules.rule import Linear, factor_at, factor_row, row_giving, row_sharding, rows
from tests.rules.harness import Case, all_rows, call_on, check, check_case, floats

aten = torch.ops.aten


def space_of(case: Case) -> Space:
    value = case.op(*case.args, **case.kwargs)
    space = rule_of(case.op).space(call_on(case, [value] if isinstance(value, torch.Tensor) else value))
    assert space is not None
    return space


def replaced_rule(monkeypatch: pytest.MonkeyPatch, op: torch._ops.OpOverload, space: Space) -> None:
    monkeypatch.setitem(register.__globals__["_RULES"], op, Rule(lambda call: space))


ADD_TWO = Case(aten.add.Scalar, (floats(4), 2.0))


def test_the_harness_finds_an_affine_op_called_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space({"d0": 4}, ((("d0",),),), ((("d0",),),), linear=(Linear((0,)),))
    replaced_rule(monkeypatch, aten.add.Scalar, space)
    with pytest.raises(AssertionError, match=r"P\(sum\) -> P\(sum\)"):
        check(ADD_TWO)


def test_the_harness_finds_a_dim_that_the_op_needs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space({"d0": 4}, ((("d0",),),), ((("d0",),),))
    replaced_rule(monkeypatch, aten.flip.default, space)
    with pytest.raises(AssertionError, match=r"S\(0\) -> S\(0\)"):
        check(Case(aten.flip.default, (floats(4), [0])))


def test_the_harness_finds_a_result_that_is_not_equal_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space({"d0": 4}, ((("d0",),),), ((),), replicated_results=frozenset({0}))
    replaced_rule(monkeypatch, aten.sum.default, space)
    with pytest.raises(AssertionError, match="replicated values differ"):
        check(Case(aten.sum.default, (floats(4),)))


def test_the_harness_finds_rows_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_rule(monkeypatch, aten.neg.default, Space({}, (((),),), (((),),)))
    with pytest.raises(AssertionError, match=r"missing \['S\(0\) -> S\(0\)'\]"):
        check_case(Case(aten.neg.default, (floats(4),), rows="S(0) -> S(0)"))


VIEW = Case(aten.view.default, (floats(4, 6, 10), [24, 10]))


def test_a_digit_inside_a_merged_dim_is_found() -> None:
    row = row_giving(space_of(VIEW), 0, Shard(0, 4), 2)
    assert row is not None and row.operands == (Shard(1),)


def test_a_digit_across_two_factors_has_no_row() -> None:
    space = space_of(VIEW)
    assert factor_at(space, space.results[0], Shard(0), 8) is None
    assert row_giving(space, 0, Shard(0), 8) is None


def test_a_dim_that_the_axis_does_not_divide_has_no_row() -> None:
    assert row_sharding(space_of(VIEW), 0, Shard(1), 4) is None


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize(
    "case",
    (
        VIEW,
        Case(aten.mm.default, (floats(4, 6), floats(6, 12))),
        Case(aten.slice.Tensor, (floats(4, 12), 1, 6, 12)),
        Case(aten.add.Tensor, (floats(4, 6), floats(6))),
    ),
    ids=str,
)
def test_a_row_is_found_from_each_of_its_placements(case: Case, size: int) -> None:
    space = space_of(case)
    for row in all_rows(space, size):
        for operand, placement in enumerate(row.operands):
            if not isinstance(placement, Replicate):
                assert row_sharding(space, operand, placement, size) == row
        for result, placement in enumerate(row.results):
            if isinstance(placement, Shard):
                assert row_giving(space, result, placement, size) == row


def test_zeros_can_be_asked_to_be_a_term_of_a_sum() -> None:
    zeros, ones = Case(aten.full.default, ([4], 0)), Case(aten.full.default, ([4], 1))
    row = row_giving(space_of(zeros), 0, Partial(), 2)
    assert row is not None and row.results == (Partial(),)
    assert row_giving(space_of(ones), 0, Partial(), 2) is None


def test_a_summed_factor_reduces_as_the_rule_says() -> None:
    row = factor_row(space_of(Case(aten.amax.default, (floats(4, 6), [0]))), "d0", 1, 2)
    assert row is not None and row.results == (Partial("max"),)


def test_operands_without_the_factor_are_replicated() -> None:
    found = {str(row) for row in rows(space_of(Case(aten.mm.default, (floats(4, 6), floats(6, 9)))), 3)}
    assert found == {
        "R, R -> R",
        "S(1), S(0) -> P(sum)",
        "R, S(1) -> S(1)",
        "P(sum), R -> P(sum)",
        "R, P(sum) -> P(sum)",
    }


def test_a_space_that_is_changed_has_rows_of_its_own() -> None:
    space = Space({"m": 8}, ((("m",),),), ((("m",),),))
    assert factor_row(space, "m", 1, 2) is not None
    assert factor_row(replace(space, blocked=frozenset({"m"})), "m", 1, 2) is None


def test_an_argument_is_found_by_name_or_default() -> None:
    call = Call(aten.sum.dim_IntList, (Tensor((4,), torch.float64), (0,)), {}, (Tensor((), torch.float64),))
    assert call.arg("dim") == (0,)
    assert call.arg("keepdim") is False
    with pytest.raises(KeyError, match="no argument 'axis'"):
        call.arg("axis")


def test_the_call_of_a_node_has_global_shapes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = floats(4, 6)
    node = graph.call_function(aten.sum.dim_IntList, (x, [1]))
    node.meta["val"] = floats(4)
    assert call_of(node).args == (Tensor((4, 6), torch.float64), (1,))
    assert call_of(node).result == Tensor((4,), torch.float64)


def test_a_rule_without_an_arrow_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        rule(aten.mm.default)("m k, k n")
    assert str(caught.value) == "a rule reads 'm k, k n -> m n'; 'm k, k n' has no '->'"


@pytest.mark.parametrize(
    ("op", "text", "expected"),
    [
        (
            aten.mm.default,
            "m k -> m k",
            "rule(aten.mm.default)('m k -> m k'): the op takes 2 tensors, the rule has 1 before '->'; write the dims of each "
            "tensor, with a comma between tensors",
        ),
        (
            aten.native_layer_norm.default,
            "b d -> b d, b, b, b",
            "rule(aten.native_layer_norm.default)('b d -> b d, b, b, b'): the op gives 3 tensors, the rule has 4 after '->'; "
            "write the dims of each tensor, with a comma between tensors",
        ),
        (
            aten.native_layer_norm.default,
            "b d, d, d, d -> b d, b, b",
            "rule(aten.native_layer_norm.default)('b d, d, d, d -> b d, b, b'): the op takes 1 to 3 tensors, the rule has 4 "
            "before '->'; write the dims of each tensor, with a comma between tensors",
        ),
        (aten.mm, "m k, k n -> m n", "rule(aten.mm): give an overload of an op, such as torch.ops.mylib.scale.default"),
    ],
    ids=("operands", "results", "optional", "packet"),
)
def test_a_rule_that_is_not_for_the_op(op: Any, text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        rule(op)(text)
    assert str(caught.value) == expected


def test_a_second_rule_for_an_op() -> None:
    op = aten.mm.default
    rule(op)("m k, k n -> m n")  # as it is already
    with pytest.raises(UserError) as caught:
        rule(op)("m! k, k n -> m! n")
    assert str(caught.value) == (
        "rule(aten.mm.default)('m! k, k n -> m! n'): the op has a rule already: 'm k, k n -> m n'; write "
        "rule(aten.mm.default, replace=True)('m! k, k n -> m! n') to put this one in its place"
    )
    before = rule_of(op)
    rule(op, replace=True)("m k, k n -> m n")
    assert rule_of(op) is not before


def test_a_mutating_op_has_no_rule() -> None:
    assert torch.Tag.pointwise in aten.add_.Tensor.tags
    assert rule_of(aten.add_.Tensor) is None


def test_a_custom_op_tagged_as_pointwise_has_a_rule() -> None:
    with torch.library._scoped_library("autoshard_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        op = torch.ops.autoshard_tests.twice.default
        check_case(Case(op, (floats(4, 6),), rows="S(0) -> S(0); S(1) -> S(1)"))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two shapes of one number of elements."""
    primes = draw(st.permutations([2, 2, 2, 3]))
    return tuple(_grouped(draw, draw(st.permutations(primes))) for _ in range(2))  # type: ignore[return-value]


def _grouped(draw: st.DrawFn, primes: list[int]) -> tuple[int, ...]:
    shape = [1]
    for prime in primes:
        if draw(st.booleans()):
            shape.append(prime)
        else:
            shape[-1] *= prime
    return tuple(shape)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(reshapes())
def test_any_reshape_keeps_its_digits(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    old, new = shapes
    case = Case(aten.view.default, (floats(*old), list(new)))
    check(case)
    assert all(R not in row.operands + row.results for row in rows(space_of(case), 2)[1:])
