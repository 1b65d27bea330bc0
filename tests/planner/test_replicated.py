"""Check that no plan is chosen that is slower than one in which each device computes everything."""

from __future__ import annotations

import pytest

from autoshard import Mesh, Options, ShardingPlan, plan
from tests.models import build


def planned(recipe: str | None) -> ShardingPlan:
    case = build("gpt")
    return plan(case.model, Mesh("dp=2,tp=2", hardware="h100"), case.args, options=Options(recipe=recipe))


@pytest.mark.slow
def test_a_model_of_launches_is_not_sharded() -> None:
    found, whole = planned("auto"), planned(None)
    assert found.search is not None and found.cost is not None and whole.cost is not None
    assert found.search.chosen == "replicated" and not found.collectives
    assert found.cost.step_time == pytest.approx(whole.cost.step_time, rel=0.01)
    assert all(one.cost is None or one.cost.step_time >= found.cost.step_time for one in found.search.candidates)
