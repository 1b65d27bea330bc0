"""Reductions whose terms combine give a partial value; the others need their dims whole."""

from __future__ import annotations

import pytest
import torch

from passes._torch import REVERSED_CUMSUM
from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten

BOOLS = floats(4, 6, 9) > -10
COUNTS = (floats(4, 6, 9) * 5).long()

CASES = (
    Case(aten.sum.default, (floats(4, 6),), rows="S(0) -> P(sum); S(1) -> P(sum); P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(aten.sum.default, (BOOLS,), note="bool", rows="S(0) -> P(sum); S(1) -> P(sum); S(2) -> P(sum)"),
    Case(
        aten.sum.default,
        (COUNTS,),
        note="int",
        rows="S(0) -> P(sum); S(1) -> P(sum); S(2) -> P(sum); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(aten.sum.default, (floats(),), note="scalar", rows="P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(
        aten.sum.dim_IntList,
        (floats(4, 6, 9), [0, -1]),
        rows="S(0) -> P(sum); S(1) -> S(0); S(2) -> P(sum); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.sum.dim_IntList,
        (floats(4, 6, 9), [1], True),
        note="keepdim",
        rows="S(0) -> S(0); S(1) -> P(sum); S(2) -> S(2); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.sum.dim_IntList,
        (floats(4, 6), []),
        note="all",
        rows="S(0) -> P(sum); S(1) -> P(sum); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(aten.mean.default, (floats(4, 6),), rows="P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(
        aten.mean.dim,
        (floats(4, 6, 9), [1], True),
        rows="S(0) -> S(0); S(2) -> S(2); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.amax.default, (floats(4, 6, 9), [-2]), rows="S(0) -> S(0); S(1) -> P(max); S(2) -> S(1); P(max) -> P(max)"
    ),
    Case(
        aten.amax.default,
        (floats(4, 6, 9), [0, 1], True),
        note="keepdim",
        rows="S(0) -> P(max); S(1) -> P(max); S(2) -> S(2); P(max) -> P(max)",
    ),
    Case(aten.amax.default, (BOOLS, [1]), note="bool", rows="S(0) -> S(0); S(2) -> S(1)"),
    Case(aten.max.default, (floats(4, 6),), rows="S(0) -> P(max); S(1) -> P(max); P(max) -> P(max)"),
    Case(
        aten.amin.default, (floats(4, 6, 9), [1]), rows="S(0) -> S(0); S(1) -> P(min); S(2) -> S(1); P(min) -> P(min)"
    ),
    Case(aten.min.default, (COUNTS,), rows="S(0) -> P(min); S(1) -> P(min); S(2) -> P(min); P(min) -> P(min)"),
    Case(aten.prod.default, (floats(4, 6),), rows="S(0) -> P(product); S(1) -> P(product); P(product) -> P(product)"),
    Case(aten.prod.dim_int, (floats(4, 6), 1, True), rows="S(0) -> S(0); S(1) -> P(product); P(product) -> P(product)"),
    Case(aten.all.default, (BOOLS,), rows=""),
    Case(aten.all.dim, (BOOLS, 1), rows="S(0) -> S(0); S(2) -> S(1)"),
    Case(aten.all.dims, (BOOLS, [0, 2], True), rows="S(1) -> S(1)"),
    Case(aten.any.default, (BOOLS,), rows=""),
    Case(aten.any.dim, (BOOLS, -1, True), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.any.dims, (BOOLS, [0, 1]), rows="S(2) -> S(0)"),
    Case(aten.argmax.default, (floats(4, 6), 1), rows="S(0) -> S(0)"),
    Case(aten.argmax.default, (floats(4, 6),), note="all", rows=""),
    Case(aten.argmin.default, (floats(4, 6), 0, True), rows="S(1) -> S(1)"),
    Case(aten.kthvalue.default, (floats(4, 6), 2, 1), rows="S(0) -> S(0), S(0)"),
    Case(aten.linalg_vector_norm.default, (floats(4, 6), 2, [1], True), rows="S(0) -> S(0)"),
    Case(aten.logsumexp.default, (floats(4, 6), [1]), rows="S(0) -> S(0)"),
    Case(aten.max.dim, (floats(4, 6, 9), 1, True), rows="S(0) -> S(0), S(0); S(2) -> S(2), S(2)"),
    Case(aten.min.dim, (floats(4, 6, 9), -1), rows="S(0) -> S(0), S(0); S(1) -> S(1), S(1)"),
    Case(aten.median.default, (floats(4, 6),), rows=""),
    Case(aten.median.dim, (floats(4, 6), 0), rows="S(1) -> S(0), S(0)"),
    Case(aten.mode.default, (COUNTS, 1), rows="S(0) -> S(0), S(0); S(2) -> S(1), S(1)"),
    Case(aten.std.correction, (floats(4, 6), [1]), {"correction": 0}, rows="S(0) -> S(0)"),
    Case(aten.std_mean.correction, (floats(4, 6), [0]), {"correction": 1, "keepdim": True}, rows="S(1) -> S(1), S(1)"),
    Case(aten.var.correction, (floats(4, 6), [1]), rows="S(0) -> S(0)"),
    Case(
        aten.var_mean.correction,
        (floats(4, 6, 9), [2]),
        {"correction": 0, "keepdim": True},
        rows="S(0) -> S(0), S(0); S(1) -> S(1), S(1)",
    ),
    Case(aten._softmax.default, (floats(4, 6, 9), -2, False), rows="S(0) -> S(0); S(2) -> S(2)"),
    Case(aten._softmax.default, (floats(), 0, False), note="scalar", rows=""),
    Case(aten._log_softmax.default, (floats(4, 6), 1, False), rows="S(0) -> S(0)"),
    Case(aten._safe_softmax.default, (floats(4, 6), 0), rows="S(1) -> S(1)"),
    Case(
        aten._softmax_backward_data.default,
        (floats(4, 6), floats(4, 6), 1, torch.float64),
        rows="S(0), S(0) -> S(0); P(avg), R -> P(avg); P(sum), R -> P(sum)",
    ),
    Case(
        aten._log_softmax_backward_data.default,
        (floats(4, 6), floats(4, 6), -1, torch.float64),
        rows="S(0), S(0) -> S(0); P(avg), R -> P(avg); P(sum), R -> P(sum)",
    ),
    Case(aten.cumsum.default, (floats(4, 6), 1), rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(
        REVERSED_CUMSUM,
        (floats(4, 6, 5), 1),
        rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.cumsum.default,
        (COUNTS, 1),
        note="int",
        rows="S(0) -> S(0); S(1) -> S(1); S(2) -> S(2); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(aten.cumsum.default, (BOOLS, 1), note="bool", rows="S(0) -> S(0); S(1) -> S(1); S(2) -> S(2)"),
    Case(aten.cumprod.default, (floats(4, 6), 1), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.cummax.default, (floats(4, 6), 1), rows="S(0) -> S(0), S(0)"),
    Case(aten.cummin.default, (floats(4, 6), 0), rows="S(1) -> S(1), S(1)"),
    Case(aten.logcumsumexp.default, (floats(4, 6), -1), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.sort.default, (floats(4, 6, 9), 1), rows="S(0) -> S(0), S(0); S(2) -> S(2), S(2)"),
    Case(aten.sort.stable, (floats(4, 6),), {"stable": True, "descending": True}, rows="S(0) -> S(0), S(0)"),
    Case(aten.argsort.default, (floats(4, 6), 0), rows="S(1) -> S(1)"),
    Case(aten.argsort.stable, (floats(4, 6),), {"stable": True, "dim": 0}, rows="S(1) -> S(1)"),
    Case(aten.topk.default, (floats(4, 9), 2), rows="S(0) -> S(0), S(0)"),
    Case(aten.topk.default, (floats(4, 9), 1), note="one", rows="S(0) -> S(0), S(0)"),
    Case(aten.histc.default, (floats(4, 6), 3), rows=""),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def test_every_op_has_a_case() -> None:
    assert ops_of("passes.rules.reduction") == {case.op for case in CASES}
