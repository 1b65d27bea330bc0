"""Convolution: each row is run, groups and transposed ones included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes._torch import ALIGNED_CONVOLUTION, ALIGNED_CONVOLUTION_INPUT, ALIGNED_CONVOLUTION_WEIGHT
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
        rows=f"S(0), R -> S(0); R, S(0) -> S(1); S(1), S(1) -> P(sum); S(3), R -> S(3); {LINEAR}",
    ),
    Case(
        aten.convolution.default,
        (IMAGE, WEIGHT, BIAS, *settings()),
        note="bias",
        rows=f"S(0), R, R -> S(0); R, S(0), S(0) -> S(1); S(3), R, R -> S(3); {LINEAR_WITH_BIAS}",
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
            "S(3), S(3), R -> S(3), P(sum), P(sum); P(sum), R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        aten.convolution_backward.default,
        (GRADIENT, IMAGE, WEIGHT, None, *settings(), [False, True, False]),
        note="weight",
        rows=(
            "S(0), S(0), R -> P(sum); S(1), R, S(0) -> S(0); R, S(1), S(1) -> S(1); S(3), S(3), R -> P(sum); "
            "P(sum), R, R -> P(sum)"
        ),
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
LINE, KERNEL = floats(2, 2, 24), floats(3, 2, 3)  # 24 positions, which all sizes of axes divide
LINE_ROWS = f"S(0), R -> S(0); R, S(0) -> S(1); S(1), S(1) -> P(sum); S(2), R -> S(2); {LINEAR}"
LINE_GRADIENTS = (
    "S(0), S(0), R -> S(0), P(sum); S(1), R, S(0) -> P(sum), S(0); R, S(1), S(1) -> S(1), S(1); "
    "S(2), S(2), R -> S(2), P(sum); P(sum), R, R -> P(sum), P(sum)"
)


def line(*, stride: int = 1, padding: int = 1, dilation: int = 1) -> tuple[Any, ...]:
    return ([stride], [padding], [dilation], False, [0], 1)


POSITIONS = tuple(
    case
    for note, kernel, how in (
        ("symmetric", 3, line()),
        ("dilated", 3, line(dilation=2, padding=2)),
        ("one_sided", 2, line(stride=2, padding=0)),
        ("strided", 3, line(stride=2)),
        ("patches", 3, line(stride=3, padding=0)),
        ("skipping", 1, line(stride=2, padding=0)),
    )
    for weight in (floats(3, 2, kernel),)
    for made in (aten.convolution.default(LINE, weight, None, *how),)
    for case in (
        Case(aten.convolution.default, (LINE, weight, None, *how), note=note, rows=LINE_ROWS),
        Case(
            aten.convolution_backward.default,
            (floats(*made.shape), LINE, weight, None, *how, [True, True, False]),
            note=note,
            rows=LINE_GRADIENTS,
        ),
    )
)
IN_PLANE = (floats(2, 2, 12, 12), floats(3, 2, 3, 5), None, [1, 1], [1, 2], [1, 1], False, [0, 0], 1)
PLANES = (
    Case(
        aten.convolution.default,
        IN_PLANE,
        note="plane",
        rows=f"S(0), R -> S(0); R, S(0) -> S(1); S(1), S(1) -> P(sum); S(2), R -> S(2); S(3), R -> S(3); {LINEAR}",
    ),
    Case(
        aten.convolution_backward.default,
        (floats(2, 3, 12, 12), *IN_PLANE, [True, True, False]),
        note="plane",
        rows=f"{LINE_GRADIENTS}; S(3), S(3), R -> S(3), P(sum)",
    ),
    Case(
        aten.convolution_backward.default,
        (floats(2, 3, 24), LINE, KERNEL, None, *line(), [False, True, False]),
        note="weight_of_positions",
        rows=(
            "S(0), S(0), R -> P(sum); S(1), R, S(0) -> S(0); R, S(1), S(1) -> S(1); S(2), S(2), R -> P(sum); "
            "P(sum), R, R -> P(sum)"
        ),
    ),
    Case(
        aten.convolution.default,
        (LINE, floats(3, 2, 15), None, *line(padding=7)),
        note="far",  # 7 positions of a neighbour, which has 6 on 4 ranks, are too many
        rows=LINE_ROWS,
    ),
)
DENSE = "R, S(0) -> S(1); S(1), S(1) -> P(sum)", "S(1), S(0) -> P(sum); R, S(1) -> S(1)"
ALIGNED = tuple(
    case
    for note, channels, kernel, settings, channel_rows, gradients in (
        ("causal", 2, 3, ([1], [2], [1], 1), *DENSE),
        ("later", 2, 3, ([1], [0], [2], 1), *DENSE),
        ("strided_causal", 2, 4, ([2], [2], [1], 1), *DENSE),
        ("depthwise_causal", 12, 4, ([1], [3], [1], 12), "S(1), S(0) -> S(1)", "S(1), S(0) -> S(1)"),
    )
    for value in (floats(2, channels, 24),)
    for weight in (floats(channels if settings[3] > 1 else 4, 1 if settings[3] > 1 else channels, kernel),)
    for grad in (floats(*ALIGNED_CONVOLUTION(value, weight, *settings).shape),)
    for case in (
        Case(
            ALIGNED_CONVOLUTION,
            (value, weight, *settings),
            note=note,
            rows=f"S(0), R -> S(0); S(2), R -> S(2); {channel_rows}; {LINEAR}",
        ),
        Case(
            ALIGNED_CONVOLUTION_INPUT,
            (grad, weight, *settings),
            note=note,
            rows=f"S(0), R -> S(0); S(2), R -> S(2); {gradients}; {LINEAR}",
        ),
        Case(
            ALIGNED_CONVOLUTION_WEIGHT,
            (grad, value, weight, *settings),
            note=note,
            rows=(
                "S(0), S(0), R -> P(sum); S(2), S(2), R -> P(sum); P(sum), R, R -> P(sum); R, P(sum), R -> P(sum); "
                + ("S(1), S(1), S(0) -> S(0)" if settings[3] > 1 else "S(1), R, S(0) -> S(0); R, S(1), S(1) -> S(1)")
            ),
        ),
    )
)
CASES = (*FORWARD, *BACKWARD, *POSITIONS, *PLANES, *ALIGNED)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


def test_every_rule_is_run() -> None:
    assert ops_of("passes.rules.conv") == {case.op for case in CASES}
