"""What a user holds after planning can be imported from autoshard, and says what it is and in which units."""

from __future__ import annotations

import inspect

import torch
from torch import nn

import autoshard


def test_what_is_read_from_a_plan_can_be_imported() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 6)
    mesh = autoshard.Mesh("dp=2", hardware="h100")
    made = autoshard.plan(model, mesh, (x,))
    by_recipe = autoshard.plan(model, mesh, (x,), options=autoshard.Options(recipe="fsdp"))
    assert made.cost is not None
    assert made.search is not None
    collective, remark, value = by_recipe.collectives[0], by_recipe.remarks[0], made.parameters["0.weight"]
    held = [made, made.mesh, made.mesh.hardware, made.cost, made.cost.memory, made.search, made.search.candidates[0]]
    held += [collective, collective.origin, remark, value, value.layout]
    names = [type(one).__name__ for one in held]
    assert [getattr(autoshard, name) for name in names] == [type(one) for one in held]


def test_public_names_are_documented() -> None:
    for name in autoshard.__all__:
        assert inspect.getdoc(getattr(autoshard, name)), name
    for kind in (autoshard.Cost, autoshard.Collective, autoshard.Search):
        text = inspect.getdoc(kind) or ""
        assert "econds" in text
        assert "bytes" in text
