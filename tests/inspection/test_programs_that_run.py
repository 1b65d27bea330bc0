"""The plan of a program that runs, and one from a file, are explained and compared as the plan that was made ahead."""

from __future__ import annotations

import torch

from autoshard import Mesh, Options, ShardingPlan, plan
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from tests.inspection.test_explanation import Deep

MESH, OPTIONS = Mesh("dp=2"), Options(recipe="fsdp")


def test_any_layer_is_explained_and_none_is_said_to_differ() -> None:
    model, x = Deep(), torch.ones(4, 8)
    ahead = plan(model, MESH, (x,), options=OPTIONS)
    run = ShardingPlan.of(make_plan(PlanRequest(model, (x,), {}, MESH, OPTIONS)).plan)
    loaded = ShardingPlan.from_json(ahead.to_json())
    assert ahead.repeats and not run.repeats
    (layers,) = ahead.repeats
    left_out, kept = f"layers.{layers.removed[0]}.weight", f"layers.{layers.below[0]}.weight"
    for one, shown in ((run, left_out), (loaded, kept), (ahead, kept)):
        lines = str(one.explain(left_out)).splitlines()
        assert lines[:3] == [
            f"parameter {left_out}",
            f"{shown}: f32[8, 8] {{dp:S(0)}}",
            "  constraint: dp:S(0): fsdp: stored sharded",
        ]
    assert str(run.diff(ahead)) == str(ahead.diff(run)) == "no difference"
