"""`pad_end` and `cut_end`: a stored part with padding at its end is a part of the longer dim."""

from __future__ import annotations

import pytest

from passes.ir.padding import CUT_END, PAD_END
from tests.rules.harness import Case, check_case, floats, ops_of

CASES = (
    Case(PAD_END, (floats(5, 12), 0, 6), rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)"),
    Case(PAD_END, (floats(12, 7), 1, 12), note="not_as_stored", rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(CUT_END, (floats(6, 12), 0, 5), rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)"),
    Case(CUT_END, (floats(12, 12), 1, 7), note="not_as_stored", rows="S(0) -> S(0); P(*) -> P(*)"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def test_every_op_has_a_case() -> None:
    assert ops_of("passes.rules.padded") == {case.op for case in CASES}
