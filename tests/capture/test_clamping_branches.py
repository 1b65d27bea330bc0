"""Branches that clamp what is not finite are taken for all values; those that change finite values are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture.capture import capture
from passes.errors import CaptureError
from tests.capture.comparing import check, run


class Model(nn.Module):
    def __init__(self, clamped: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.clamped = nn.Linear(4, 4), clamped

    def forward(self, x: Tensor) -> Tensor:
        return self.clamped(self.layer(x)) * 2


def as_encoders_of_transformers(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        clamp_value = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-clamp_value, max=clamp_value)
    return x


def with_methods(x: Tensor) -> Tensor:
    if torch.any(x.isinf()):
        x = x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
    return x


def in_place(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        x.clamp_(max=torch.finfo(x.dtype).max)
    return x


def of_one_side(x: Tensor) -> Tensor:
    if x.isinf().any():
        y = x.clamp(max=torch.finfo(x.dtype).max)
        x = y
    return x


def of_nan(x: Tensor) -> Tensor:
    if x.isnan().any():
        x = x.nan_to_num(0.5)
    return x


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        if not x.isfinite().all():
            x = torch.nan_to_num(x)
        x = x.sin()
    return x


@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("clamped", [as_encoders_of_transformers, with_methods, in_place, of_one_side, of_nan, in_a_loop])
def test_a_branch_that_clamps_what_is_not_finite_is_taken(clamped: Callable[[Tensor], Tensor], value: float) -> None:
    model, x = Model(clamped).double(), torch.randn(2, 4, dtype=torch.float64)
    captured = check(model, x)
    x[0, 0] = value
    tangents = {path: torch.ones(2, 4, dtype=torch.float64) for path in captured.signature.outputs}
    output = next(iter(run(captured, model, (x,), {}, tangents).values()))
    torch.testing.assert_close(output, model(x).detach(), equal_nan=True)


def changes_finite_values(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.clamp(x, min=-1, max=1)
    return x


def checks_another(x: Tensor) -> Tensor:
    y = x.exp()
    if not torch.isfinite(y).all():
        x = torch.nan_to_num(x, 0.0)
    return x


def computes_more(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.nan_to_num(x) * 2
    return x


def takes_another(x: Tensor) -> Tensor:
    y, z = x.sin(), x.cos()
    if not torch.isfinite(y).all():
        z = torch.nan_to_num(y)
    return z


def counts(x: Tensor) -> Tensor:
    number = 1
    if not torch.isfinite(x).all():
        x = torch.nan_to_num(x)
        number = 2
    return x * number


def clamps_to_the_largest(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.clamp(x, min=torch.finfo(x.dtype).max)
    return x


def runs_if_all_are_finite(x: Tensor) -> Tensor:
    if torch.isfinite(x).all():
        x = torch.nan_to_num(x)
    return x


def has_an_else(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.nan_to_num(x)
    else:
        x = x * 2
    return x


@pytest.mark.parametrize(
    "clamped",
    [
        *(changes_finite_values, clamps_to_the_largest, checks_another, computes_more, takes_another, counts),
        *(runs_if_all_are_finite, has_an_else),
    ],
)
def test_a_branch_that_changes_finite_values_is_refused(clamped: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"^the model branches on the value of a tensor"):
        capture(Model(clamped), (torch.ones(2, 4),), training=True)
