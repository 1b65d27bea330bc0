"""Normalizations: each row is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten


def small(*shape: int) -> torch.Tensor:
    """Return numbers in [-1, 1]."""
    return floats(*shape) * (8 / torch.Size(shape).numel())


WEIGHT, BIAS = small(6), small(6)
TOKENS, GRADIENT = small(4, 12, 6), small(4, 12, 6)
_, MEAN, RSTD = aten.native_layer_norm(TOKENS, [6], WEIGHT, BIAS, 1e-5)
_, MEAN_2D, RSTD_2D = aten.native_layer_norm(TOKENS, [12, 6], None, None, 1e-5)
_, RMS_RSTD = aten._fused_rms_norm(TOKENS, [6], WEIGHT, 1e-5)
LAST = (
    Case(
        aten.native_layer_norm.default,
        (TOKENS, [6], WEIGHT, BIAS, 1e-5),
        rows="S(0), R, R -> S(0), S(0), S(0); S(1), R, R -> S(1), S(1), S(1)",
    ),
    Case(
        aten.native_layer_norm.default,
        (TOKENS, [12, 6], None, None, 1e-5),
        note="two_dims",
        rows="S(0) -> S(0), S(0), S(0)",
    ),
    Case(
        aten.native_layer_norm_backward.default,
        (GRADIENT, TOKENS, [6], MEAN, RSTD, WEIGHT, BIAS, [True, True, True]),
        rows=(
            "S(0), S(0), S(0), S(0), R, R -> S(0), P(sum), P(sum); "
            "S(1), S(1), S(1), S(1), R, R -> S(1), P(sum), P(sum); "
            "P(sum), R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        aten.native_layer_norm_backward.default,
        (GRADIENT, TOKENS, [6], MEAN, RSTD, WEIGHT, None, [False, True, False]),
        note="weight",
        rows=("S(0), S(0), S(0), S(0), R -> P(sum); S(1), S(1), S(1), S(1), R -> P(sum); P(sum), R, R, R, R -> P(sum)"),
    ),
    Case(
        aten.native_layer_norm_backward.default,
        (GRADIENT, TOKENS, [12, 6], MEAN_2D, RSTD_2D, None, None, [True, False, False]),
        note="two_dims",
        rows="S(0), S(0), S(0), S(0) -> S(0); P(sum), R, R, R -> P(sum)",
    ),
    Case(
        aten._fused_rms_norm.default, (TOKENS, [6], WEIGHT, 1e-5), rows="S(0), R -> S(0), S(0); S(1), R -> S(1), S(1)"
    ),
    Case(
        aten._fused_rms_norm.default,
        (TOKENS, [6], None, None),
        note="plain",
        rows="S(0) -> S(0), S(0); S(1) -> S(1), S(1)",
    ),
    Case(
        aten._fused_rms_norm_backward.default,
        (GRADIENT, TOKENS, [6], RMS_RSTD, WEIGHT, [True, True]),
        rows=(
            "S(0), S(0), S(0), R -> S(0), P(sum); S(1), S(1), S(1), R -> S(1), P(sum); "
            "P(sum), R, R, R -> P(sum), P(sum)"
        ),
    ),
    Case(
        aten._fused_rms_norm_backward.default,
        (GRADIENT, TOKENS, [6], RMS_RSTD, WEIGHT, [True, False]),
        note="frozen",
        rows="S(0), S(0), S(0), R -> S(0); S(1), S(1), S(1), R -> S(1); P(sum), R, R, R -> P(sum)",
    ),
)

IMAGE, IMAGE_GRADIENT, CHANNEL, SHIFT = small(4, 12, 5, 3), small(4, 12, 5, 3), small(12), small(12)
SIZES = (4, 12, 15, 4)
_, GROUP_MEAN, GROUP_RSTD = aten.native_group_norm(IMAGE, CHANNEL, SHIFT, *SIZES, 1e-5)
GROUPS = (
    Case(
        aten.native_group_norm.default,
        (IMAGE, CHANNEL, SHIFT, *SIZES, 1e-5),
        rows="S(0), R, R -> S(0), S(0), S(0); S(1), S(0), S(0) -> S(1), S(1), S(1)",
    ),
    Case(
        aten.native_group_norm.default,
        (IMAGE, None, None, 4, 12, 15, 1, 1e-5),
        note="one",
        rows="S(0) -> S(0), S(0), S(0)",
    ),
    Case(
        aten.native_group_norm_backward.default,
        (IMAGE_GRADIENT, IMAGE, GROUP_MEAN, GROUP_RSTD, CHANNEL, *SIZES, [True, True, True]),
        rows=(
            "S(0), S(0), S(0), S(0), R -> S(0), P(sum), P(sum); "
            "S(1), S(1), S(1), S(1), S(0) -> S(1), S(0), S(0); "
            "P(sum), R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        aten.native_group_norm_backward.default,
        (IMAGE_GRADIENT, IMAGE, GROUP_MEAN, GROUP_RSTD, CHANNEL, *SIZES, [True, False, True]),
        note="bias",
        rows=(
            "S(0), S(0), S(0), S(0), R -> S(0), P(sum); S(1), S(1), S(1), S(1), S(0) -> S(1), S(0); "
            "P(sum), R, R, R, R -> P(sum), P(sum)"
        ),
    ),
)


def statistics() -> tuple[torch.Tensor, torch.Tensor]:
    """Return running mean and variance."""
    return small(12), small(12).abs() + 0.5


_, BATCH_MEAN, BATCH_INVSTD = aten._native_batch_norm_legit.no_stats(IMAGE, CHANNEL, SHIFT, True, 0.1, 1e-5)
EMPTY = torch.empty(0, dtype=torch.float64)
ALL = [True, True, True]
BATCHES = (
    Case(
        aten._native_batch_norm_legit.no_stats,
        (IMAGE, CHANNEL, SHIFT, True, 0.1, 1e-5),
        rows="S(1), S(0), S(0) -> S(1), S(0), S(0)",
    ),
    Case(
        aten.native_batch_norm.default,
        (IMAGE, CHANNEL, SHIFT, None, None, True, 0.1, 1e-5),
        rows="S(1), S(0), S(0) -> S(1), S(0), S(0)",
    ),
    Case(
        aten.native_batch_norm.default,
        (IMAGE, CHANNEL, SHIFT, *statistics(), False, 0.1, 1e-5),
        note="evaluation",
        rows=(
            "S(0), R, R, R, R -> S(0), R, R; S(1), S(0), S(0), S(0), S(0) -> S(1), R, R; S(3), R, R, R, R -> S(3), R, R"
        ),
    ),
    Case(
        aten._native_batch_norm_legit_functional.default,
        (IMAGE, CHANNEL, SHIFT, *statistics(), True, 0.1, 1e-5),
        rows="S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), S(0), S(0)",
    ),
    Case(
        aten._native_batch_norm_legit_functional.default,
        (IMAGE, CHANNEL, SHIFT, *statistics(), False, 0.1, 1e-5),
        note="evaluation",
        rows=(
            "S(0), R, R, R, R -> S(0), R, R, R, R; "
            "S(1), S(0), S(0), S(0), S(0) -> S(1), R, R, S(0), S(0); "
            "S(3), R, R, R, R -> S(3), R, R, R, R"
        ),
    ),
    Case(
        aten._native_batch_norm_legit_no_training.default,
        (IMAGE, None, None, *statistics(), 0.1, 1e-5),
        rows="S(0), R, R -> S(0), R, R; S(1), S(0), S(0) -> S(1), R, R; S(3), R, R -> S(3), R, R",
    ),
    Case(
        aten.native_batch_norm_backward.default,
        (IMAGE_GRADIENT, IMAGE, CHANNEL, *statistics(), BATCH_MEAN, BATCH_INVSTD, True, 1e-5, ALL),
        rows=(
            "S(1), S(1), S(0), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0); "
            "P(sum), R, R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        aten.native_batch_norm_backward.default,
        (IMAGE_GRADIENT, IMAGE, CHANNEL, *statistics(), EMPTY, EMPTY, False, 1e-5, ALL),
        note="evaluation",
        rows=(
            "S(0), S(0), R, R, R, R, R -> S(0), P(sum), P(sum); "
            "S(1), S(1), S(0), S(0), S(0), R, R -> S(1), S(0), S(0); "
            "P(sum), R, R, R, R, R, R -> P(sum), P(sum), P(sum); "
            "S(3), S(3), R, R, R, R, R -> S(3), P(sum), P(sum)"
        ),
    ),
)
WEIGHTS = (
    Case(
        aten._weight_norm_interface_backward.default,
        (floats(6, 4, 3), floats(6, 4, 3), floats(6, 1, 1), floats(6, 1, 1).abs() + 1, 0),
        rows="S(0), S(0), S(0), S(0) -> S(0), S(0); P(sum), R, R, R -> P(sum), P(sum)",
    ),
    Case(
        aten._weight_norm_interface_backward.default,
        (floats(4, 3, 6), floats(4, 3, 6), floats(1, 1, 6), floats(1, 1, 6).abs() + 1, 2),
        note="last_dim",
        rows="S(2), S(2), S(2), S(2) -> S(2), S(2); P(sum), R, R, R -> P(sum), P(sum)",
    ),
)
CASES = (*LAST, *GROUPS, *BATCHES, *WEIGHTS)


@pytest.fixture(autouse=True)
def _rms_norm_backward_on_cpu() -> Iterator[None]:
    """Compute by its formula what only an accelerator has a kernel for."""
    untyped: Any = torch.library
    library = untyped.Library("aten", "IMPL", "CPU")
    library.impl("_fused_rms_norm_backward", rms_norm_backward)
    yield
    library._destroy()


def rms_norm_backward(
    grad: torch.Tensor, value: torch.Tensor, shape: list[int], rstd: torch.Tensor, weight: Any, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dims = tuple(range(-len(shape), 0))
    normalized = value * rstd
    scaled = grad if weight is None else grad * weight
    grad_value = rstd * (scaled - normalized * (scaled * normalized).mean(dims, keepdim=True))
    grad_weight = (grad * normalized).flatten(0, value.dim() - len(shape) - 1).sum(0)
    return grad_value if mask[0] else None, grad_weight if mask[1] else None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


def test_every_rule_is_run() -> None:
    assert ops_of("passes.rules.norm") == {case.op for case in CASES}
