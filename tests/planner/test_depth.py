"""Depth costs little: equal layers are planned as one."""

from __future__ import annotations

import time

import pytest
import torch

from autoshard import Mesh, Options, plan
from autoshard.planner import recomputation
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from passes.cost.program import Program
from passes.cost.unroll import unroll
from passes.errors import UnlikeLayersError
from passes.ir.folded_layers import Repeats
from tests.extended import extended
from tests.planner.test_search import on_meta
from tests.spmd.decoders import decoder


def seconds_after_capture(layers: int) -> float:
    """Return the process time of everything that a searched plan takes once the model is captured."""
    model, args = on_meta(64, 16, layers)
    begun: dict[str, float] = {}

    def progress(phase: str) -> None:
        begun.setdefault(phase, time.process_time())

    plan_ahead(PlanRequest(model, args, {}, Mesh("dp=2,tp=2", hardware="h100"), Options()), progress=progress)
    return time.process_time() - begun["fold"]


@pytest.mark.extended
def test_four_times_the_layers_take_at_most_twice_as_long_after_capture() -> None:
    torch.manual_seed(0)
    seconds_after_capture(8)  # what is cached once is not measured
    few, many = seconds_after_capture(12), seconds_after_capture(48)
    assert many <= 2 * few, f"{few:.1f} s and {many:.1f} s"


def test_a_solution_whose_layers_become_unlike_is_planned_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that it was found on was traced from a few layers, and names no node of the others."""

    def unlike(program: Program, repeats: Repeats) -> Program:
        if repeats.runs:
            raise UnlikeLayersError("layers.2 and layers.9 differ")
        return unroll(program, repeats)

    monkeypatch.setattr(recomputation, "unroll", unlike)
    model, args = on_meta(64, 16, 10)
    request = PlanRequest(model, args, {}, Mesh("tp=2", hardware="h100"), Options())
    plan, _ = plan_ahead(request)
    assert plan.search is not None and "solved" in [one.name for one in plan.search.candidates if one.cost is not None]
    assert any("all layers are planned" in remark.text for remark in plan.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", extended("ring")])
def test_layers_whose_way_is_recomputed_are_planned_as_one(way: str) -> None:
    """Their masks are of few numbers, the places of the rank and of its chunks, which join no kernels of two layers."""
    case = decoder(layers=7, seq=32)
    options = Options(recipe=f"context({way})", recompute="block")
    found = plan(case.model, Mesh("cp=4", hardware="h100"), case.args, options=options)
    assert [one.text for one in found.remarks if one.pass_name == "fold"] == ["blocks.2 for blocks.3 to blocks.3"]
