"""Products: the summed factor gives partial values."""

from __future__ import annotations

import pytest
import torch

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten

CASES = (
    Case(
        aten.mm.default,
        (floats(4, 6), floats(6, 9)),
        rows="R, S(1) -> S(1); S(0), R -> S(0); S(1), S(0) -> P(sum); P(sum), R -> P(sum); R, P(sum) -> P(sum)",
    ),
    Case(
        aten.bmm.default,
        (floats(8, 4, 6), floats(8, 6, 9)),
        rows="R, S(2) -> S(2); S(0), S(0) -> S(0); S(1), R -> S(1); "
        "S(2), S(1) -> P(sum); P(sum), R -> P(sum); R, P(sum) -> P(sum)",
    ),
    Case(
        aten.mv.default,
        (floats(4, 6), floats(6)),
        rows="S(0), R -> S(0); S(1), S(0) -> P(sum); P(sum), R -> P(sum); R, P(sum) -> P(sum)",
    ),
    Case(
        aten.dot.default, (floats(6), floats(6)), rows="S(0), S(0) -> P(sum); P(sum), R -> P(sum); R, P(sum) -> P(sum)"
    ),
    Case(
        aten.addmm.default,
        (floats(9), floats(4, 6), floats(6, 9)),
        rows="R, S(0), R -> S(0); S(0), R, S(1) -> S(1); P(sum), P(sum), R -> P(sum); "
        "P(sum), R, P(sum) -> P(sum); P(sum), S(1), S(0) -> P(sum)",
    ),
    Case(
        aten.addmm.default,
        (floats(4, 1), floats(4, 6), floats(6, 9)),
        {"beta": 2, "alpha": 0.5},
        note="scaled",
        rows="R, R, S(1) -> S(1); S(0), S(0), R -> S(0); P(sum), P(sum), R -> P(sum); "
        "P(sum), R, P(sum) -> P(sum); P(sum), S(1), S(0) -> P(sum)",
    ),
    Case(
        aten.baddbmm.default,
        (floats(8, 4, 9), floats(8, 4, 6), floats(8, 6, 9)),
        rows="S(0), S(0), S(0) -> S(0); S(1), S(1), R -> S(1); S(2), R, S(2) -> S(2); "
        "P(sum), P(sum), R -> P(sum); P(sum), R, P(sum) -> P(sum); P(sum), S(2), S(1) -> P(sum)",
    ),
    Case(
        aten.addbmm.default,
        (floats(4, 9), floats(8, 4, 6), floats(8, 6, 9)),
        {"beta": 2, "alpha": 0.5},
        rows="S(0), S(1), R -> S(0); S(1), R, S(2) -> S(1); P(sum), S(0), S(0) -> P(sum); "
        "P(sum), P(sum), R -> P(sum); P(sum), R, P(sum) -> P(sum); P(sum), S(2), S(1) -> P(sum)",
    ),
    Case(
        aten.addmv.default,
        (floats(4), floats(4, 6), floats(6)),
        rows="S(0), S(0), R -> S(0); P(sum), P(sum), R -> P(sum); "
        "P(sum), R, P(sum) -> P(sum); P(sum), S(1), S(0) -> P(sum)",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def test_every_product_has_a_case() -> None:
    einsums = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}
    assert ops_of("passes.rules.matmul") | einsums == {case.op for case in CASES}
