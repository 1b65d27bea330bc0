"""Depth costs little: equal layers are planned as one."""

from __future__ import annotations

import time

import pytest
import torch

from autoshard import Mesh, Options
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from tests.planner.test_search import on_meta


def seconds_after_capture(layers: int) -> float:
    """Return the process time of everything that a searched plan takes once the model is captured."""
    model, args = on_meta(64, 16, layers)
    begun: dict[str, float] = {}

    def progress(phase: str) -> None:
        begun.setdefault(phase, time.process_time())

    plan_ahead(PlanRequest(model, args, {}, Mesh("dp=2,tp=2", hardware="h100"), Options()), progress=progress)
    return time.process_time() - begun["fold"]


@pytest.mark.slow
def test_four_times_the_layers_take_at_most_twice_as_long_after_capture() -> None:
    torch.manual_seed(0)
    seconds_after_capture(8)  # what is cached once is not measured
    few, many = seconds_after_capture(12), seconds_after_capture(48)
    assert many <= 2 * few, f"{few:.1f} s and {many:.1f} s"
