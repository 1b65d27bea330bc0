"""Explaining a searched plan goes on with the search that made it."""

from __future__ import annotations

import pytest
import torch

from autoshard import Mesh, Options, plan
from examples.mlp import mlp
from passes.search import prepared


def test_an_explanation_does_not_search_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, args = mlp()
    found = plan(model, Mesh("dp=2,tp=2", hardware="h100"), args, options=Options(recompute="none"))
    monkeypatch.setattr(prepared, "SearchState", lambda *_: pytest.fail("it was searched for again"))
    assert found.explain("layers.0.up.weight").choices[0].alternatives
