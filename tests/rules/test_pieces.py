"""Slices and joints: an equal part of a dim is an inner digit of it."""

from __future__ import annotations

import pytest
import torch

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten

CASES = (
    Case(aten.slice.Tensor, (floats(4, 12), 1, 4, 8), note="part", rows="S(0) -> S(0); S(1/3) -> S(1); P(*) -> P(*)"),
    Case(aten.slice.Tensor, (floats(4, 12), -1, -4), note="last", rows="S(0) -> S(0); S(1/3) -> S(1); P(*) -> P(*)"),
    Case(
        aten.slice.Tensor,
        (floats(4, 12), 1, 0, 2**63 - 1),
        note="whole",
        rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)",
    ),
    Case(aten.slice.Tensor, (floats(4, 12), 1, 3, 7), note="across", rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.slice.Tensor, (floats(4, 12), 0, 2, 2), note="empty", rows="S(1) -> S(1); P(*) -> P(*)"),
    Case(
        aten.slice.Tensor, (floats(4, 12), 1, 1, 12, 3), note="steps", rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)"
    ),
    Case(aten.slice.Tensor, (floats(4, 12), 1, 1, 9, 3), note="some_steps", rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.glu.default, (floats(4, 12),), rows="S(0) -> S(0); S(1/2) -> S(1)"),
    Case(aten.glu.default, (floats(4, 6), 0), note="first_dim", rows="S(0/2) -> S(0); S(1) -> S(1)"),
    Case(
        aten.slice_scatter.default,
        (floats(4, 12), floats(4, 6), 1, 6, 12),
        rows="S(0), S(0) -> S(0); S(1/2), S(1) -> S(1/2); P(*), P(*) -> P(*)",
    ),
    Case(
        aten.slice_scatter.default,
        (floats(4, 12), floats(4, 6), -1, -6),
        note="last",
        rows="S(0), S(0) -> S(0); S(1/2), S(1) -> S(1/2); P(*), P(*) -> P(*)",
    ),
    Case(
        aten.slice_scatter.default,
        (floats(4, 12), floats(4, 6), 1, 0, 12, 2),
        note="steps",
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(*), P(*) -> P(*)",
    ),
    Case(
        aten.slice_scatter.default,
        (floats(4, 12), floats(4, 5), 1, 2, 7),
        note="across",
        rows="S(0), S(0) -> S(0); P(*), P(*) -> P(*)",
    ),
    Case(
        aten.slice_backward.default,
        (floats(4, 6), [4, 12], 1, 6, 12, 1),
        rows="S(0) -> S(0); S(1) -> S(1/2); P(*) -> P(*)",
    ),
    Case(
        aten.slice_backward.default,
        (floats(4, 6), [4, 12], 1, -6, 12, 1),
        note="last",
        rows="S(0) -> S(0); S(1) -> S(1/2); P(*) -> P(*)",
    ),
    Case(
        aten.slice_backward.default,
        (floats(4, 5), [4, 12], -1, 2, 7, 1),
        note="across",
        rows="S(0) -> S(0); P(*) -> P(*)",
    ),
    Case(aten.select.int, (floats(4, 6, 9), 1, -1), rows="S(0) -> S(0); S(2) -> S(1); P(*) -> P(*)"),
    Case(
        aten.select_scatter.default,
        (floats(4, 6, 9), floats(4, 9), 1, 2),
        rows="S(0), S(0) -> S(0); S(2), S(1) -> S(2); P(*), P(*) -> P(*)",
    ),
    Case(
        aten.select_backward.default, (floats(4, 9), [4, 6, 9], -2, 2), rows="S(0) -> S(0); S(1) -> S(2); P(*) -> P(*)"
    ),
    Case(
        aten.split.Tensor,
        (floats(4, 12), 4, -1),
        rows="S(0) -> S(0), S(0), S(0); S(1/3) -> S(1), S(1), S(1); P(*) -> P(*), P(*), P(*)",
    ),
    Case(
        aten.split.Tensor, (floats(4, 12), 5, 1), note="rest", rows="S(0) -> S(0), S(0), S(0); P(*) -> P(*), P(*), P(*)"
    ),
    Case(
        aten.split_with_sizes.default,
        (floats(12, 4), [6, 6]),
        rows="S(0/2) -> S(0), S(0); S(1) -> S(1), S(1); P(*) -> P(*), P(*)",
    ),
    Case(
        aten.split_with_sizes.default,
        (floats(4, 12), [6, 4, 2], 1),
        note="unequal",
        rows="S(0) -> S(0), S(0), S(0); P(*) -> P(*), P(*), P(*)",
    ),
    Case(
        aten.unbind.int,
        (floats(4, 3, 6), -2),
        rows="S(0) -> S(0), S(0), S(0); S(2) -> S(1), S(1), S(1); P(*) -> P(*), P(*), P(*)",
    ),
    Case(
        aten.cat.default,
        ([floats(4, 6), floats(4, 6)], -1),
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1/2); P(*), P(*) -> P(*)",
    ),
    Case(
        aten.cat.default,
        ([floats(4, 6), floats(4, 2), floats(4, 6)], 1),
        note="unequal",
        rows="S(0), S(0), S(0) -> S(0); P(*), P(*), P(*) -> P(*)",
    ),
    Case(aten.cat.default, ([floats(4, 6), floats(0)], 0), note="legacy", rows=""),
    Case(
        aten.stack.default,
        ([floats(4, 6), floats(4, 6), floats(4, 6)], -1),
        rows="S(0), S(0), S(0) -> S(0); S(1), S(1), S(1) -> S(1); P(*), P(*), P(*) -> P(*)",
    ),
    Case(
        aten.constant_pad_nd.default, (floats(4, 6, 9), [0, 0, 1, 2]), rows="S(0) -> S(0); S(2) -> S(2); P(*) -> P(*)"
    ),
    Case(
        aten.constant_pad_nd.default,
        (floats(4, 6, 9), [-1, 0], 0.0),
        note="cut",
        rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)",
    ),
    Case(
        aten.constant_pad_nd.default,
        (floats(4, 6, 9), [1, 1], 0.5),
        note="value",
        rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(max) -> P(max); P(min) -> P(min)",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def test_every_op_has_a_case() -> None:
    assert ops_of("passes.rules.pieces") == {case.op for case in CASES}
