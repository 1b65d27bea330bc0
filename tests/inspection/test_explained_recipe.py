"""Explaining a plan of a recipe on three axes takes seconds: its alternatives use two of the axes alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoshard import Mesh, Options, plan
from autoshard.planner import state
from passes.hardware.hardware import hardware_named
from passes.search.prepared import Prepared, prepare
from tests.inspection.test_explanation import Wide


def test_alternatives_to_a_recipe_on_three_axes_use_two_of_them_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    stated: list[Prepared] = []

    def stating(*args: Any, **named: Any) -> Prepared:
        stated.append(prepare(*args, **named))
        return stated[-1]

    monkeypatch.setattr(state, "prepare", stating)
    with torch.device("meta"):
        model, x = Wide(), torch.empty(2048, 1024)
    options = Options(recipe={"dp": "fsdp", "ep": "fsdp", "tp": "megatron"})
    found = plan(model, Mesh("dp=2,ep=2,tp=2", hardware="h100"), (x, x), options=options).explain("up.weight")
    assert [one.skeleton.axis_groups for one in stated] == [((0, 1), (2,))]
    assert any(one.layout == found.choices[0].layout for one in found.choices[0].alternatives)
    assert found.notes == ("alternatives are of plans that use dp and ep alike, so that they are found in seconds",)


def test_a_plan_that_does_not_fit_is_explained_with_prices_in_any_memory() -> None:
    """Explaining it raised that the search found no layouts that fit."""
    small = replace(hardware_named("h100"), memory_bytes=10_000_000)
    with torch.device("meta"):
        model, x = Wide(), torch.empty(2048, 1024)
    found = plan(model, Mesh("dp=2", hardware=small), (x, x), options=Options(recipe="ddp"))
    assert found.cost is not None and found.cost.peak_memory > small.memory_bytes
    explained = found.explain("up.weight")
    assert len(explained.choices[0].alternatives) > 1
    assert explained.notes == (
        "the search's model finds no plan that fits in memory: alternatives are priced as if there was enough of it",
    )
