"""Factories: each rank makes its part of a tensor."""

from __future__ import annotations

import pytest
import torch

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten
prims = torch.ops.prims

IOTA = {"start": 3, "step": -2, "dtype": torch.int64, "device": "cpu", "requires_grad": False}
F64 = {"dtype": torch.float64}

CASES = (
    Case(aten.full.default, ([4, 6], 2.5), rows=" -> S(0);  -> S(1)"),
    Case(aten.full.default, ([4, 6], 0), F64, note="zero", rows=" -> P(sum);  -> S(0);  -> S(1)"),
    Case(aten.full.default, ([], 1), note="scalar", rows=""),
    Case(aten.zeros.default, ([4, 6],), rows=" -> P(sum);  -> S(0);  -> S(1)"),
    Case(aten.ones.default, ([4, 1],), rows=" -> S(0)"),
    Case(aten.empty.memory_format, ([4, 6],), values=False, rows=" -> S(0);  -> S(1)"),
    Case(aten.empty_strided.default, ([4, 6], [1, 4]), values=False, rows=" -> S(0);  -> S(1)"),
    Case(aten.new_empty.default, (floats(3, 2), [4, 6]), values=False, rows="R -> S(0); R -> S(1)"),
    Case(aten.new_empty_strided.default, (floats(3, 2), [4, 6], [1, 4]), values=False, rows="R -> S(0); R -> S(1)"),
    Case(aten.new_full.default, (floats(3, 2), [4, 6], 2.5), rows="R -> S(0); R -> S(1)"),
    Case(aten.new_ones.default, (floats(3, 2), [4, 6]), rows="R -> S(0); R -> S(1)"),
    Case(aten.new_zeros.default, (floats(3, 2), [4, 6]), rows="R -> P(sum); R -> S(0); R -> S(1)"),
    Case(aten.empty_like.default, (floats(4, 6),), values=False, rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.full_like.default, (floats(4, 6), 2), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.ones_like.default, (floats(4, 6),), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.zeros_like.default, (floats(4, 6),), rows="R -> P(sum); S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.scalar_tensor.default, (0.5,), F64, rows=""),
    Case(aten.scalar_tensor.default, (0,), F64, note="zero", rows=" -> P(sum)"),
    Case(aten.arange.default, (12,), rows=" -> S(0)"),
    Case(aten.arange.default, (6.0,), F64, note="float", rows=" -> S(0)"),
    Case(aten.arange.start, (3, 15), rows=" -> S(0)"),
    Case(aten.arange.start_step, (1.5, 7.5, 0.5), F64, rows=" -> S(0)"),
    Case(aten.arange.start_step, (9, -3, -2), note="down", rows=" -> S(0)"),
    Case(prims.iota.default, (12,), IOTA, rows=" -> S(0)"),
    Case(aten.eye.default, (6,), rows=" -> S(0);  -> S(1)"),
    Case(aten.eye.m, (4, 6), F64, rows=" -> S(0);  -> S(1)"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def test_every_factory_has_a_case() -> None:
    assert ops_of("passes.rules.factory") == {case.op for case in CASES}
