"""Convolution: each row is run, groups and transposed ones included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten

IMAGE, WEIGHT, BIAS, GRADIENT = floats(4, 6, 5, 3), floats(8, 6, 3, 1), floats(8), floats(4, 8, 5, 3)
UP = floats(6, 4, 3, 1)  # of a transposed convolution in two groups: 6 channels to 8


def settings(*, transposed: bool = False, groups: int = 1, padding: tuple[int, ...] = (1, 0)) -> tuple[Any, ...]:
    """Return stride, padding, dilation, transposed, output padding, groups."""
    ndim = len(padding)
    return ([1] * ndim, list(padding), [1] * ndim, transposed, [0] * ndim, groups)


LINEAR = "P(sum), R -> P(sum); R, P(sum) -> P(sum)"
LINEAR_WITH_BIAS = "P(sum), R, P(sum) -> P(sum); R, P(sum), P(sum) -> P(sum)"
FORWARD = (
    Case(
        aten.convolution.default,
        (IMAGE, WEIGHT, None, *settings()),
        rows=f"S(0), R -> S(0); R, S(0) -> S(1); S(1), S(1) -> P(sum); {LINEAR}",
    ),
    Case(
        aten.convolution.default,
        (IMAGE, WEIGHT, BIAS, *settings()),
        note="bias",
        rows=f"S(0), R, R -> S(0); R, S(0), S(0) -> S(1); {LINEAR_WITH_BIAS}",
    ),
    Case(
        aten.convolution.default,
        (floats(4, 6, 5), floats(18, 1, 3), None, *settings(groups=6, padding=(1,))),
        note="depthwise",
        rows=f"S(0), R -> S(0); S(1), S(0) -> S(1); R, S(0/6) -> S(1/6); {LINEAR}",
    ),
    Case(
        aten.convolution.default,
        (floats(4, 8, 5), floats(12, 4, 3), None, *settings(groups=2, padding=(0,))),
        note="groups",
        rows=f"S(0), R -> S(0); S(1), S(0) -> S(1); R, S(0/2) -> S(1/2); S(1/2), S(1) -> P(sum); {LINEAR}",
    ),
    Case(
        aten.convolution.default,
        (IMAGE, UP, BIAS, *settings(transposed=True, groups=2)),
        note="transposed",
        rows=f"S(0), R, R -> S(0); S(1), S(0), S(0) -> S(1); R, S(1), S(0/2) -> S(1/2); {LINEAR_WITH_BIAS}",
    ),
    Case(
        aten.convolution.default,
        (IMAGE, UP, None, *settings(transposed=True, groups=2)),
        note="transposed_without_bias",
        rows=f"S(0), R -> S(0); S(1), S(0) -> S(1); R, S(1) -> S(1/2); S(1/2), S(0/2) -> P(sum); {LINEAR}",
    ),
)
BACKWARD = (
    Case(
        aten.convolution_backward.default,
        (GRADIENT, IMAGE, WEIGHT, [8], *settings(), [True, True, True]),
        rows=(
            "S(0), S(0), R -> S(0), P(sum), P(sum); S(1), R, S(0) -> P(sum), S(0), S(0); "
            "P(sum), R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        aten.convolution_backward.default,
        (GRADIENT, IMAGE, WEIGHT, None, *settings(), [False, True, False]),
        note="weight",
        rows="S(0), S(0), R -> P(sum); S(1), R, S(0) -> S(0); R, S(1), S(1) -> S(1); P(sum), R, R -> P(sum)",
    ),
    Case(
        aten.convolution_backward.default,
        (
            floats(4, 18, 5),
            floats(4, 6, 5),
            floats(18, 1, 3),
            [18],
            *settings(groups=6, padding=(1,)),
            [True, True, True],
        ),
        note="depthwise",
        rows=(
            "S(0), S(0), R -> S(0), P(sum), P(sum); S(1), S(1), S(0) -> S(1), S(0), S(0); "
            "S(1/6), R, S(0/6) -> P(sum), S(0/6), S(0/6); P(sum), R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        aten.convolution_backward.default,
        (GRADIENT, IMAGE, UP, [8], *settings(transposed=True, groups=2), [True, True, True]),
        note="transposed",
        rows=(
            "S(0), S(0), R -> S(0), P(sum), P(sum); S(1), S(1), S(0) -> S(1), S(0), S(0); "
            "S(1/2), R, S(1) -> P(sum), S(1), S(0/2); P(sum), R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
)
CASES = (*FORWARD, *BACKWARD)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


def test_every_rule_is_run() -> None:
    assert ops_of("passes.rules.conv") == {case.op for case in CASES}
