"""Outputs that a model makes for each batch are this rank's part, as those that it computes from the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, plan
from autoshard.capture.capture import capture

BATCH = 4


class Noisy(nn.Module):
    """Returns what diffusion does, noise and times that it draws; and what has as many rows as the batch by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.table = nn.Linear(6, 6), nn.Parameter(torch.ones(BATCH, 5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        noise, time = torch.randn_like(x), torch.randint(0, 10, (x.shape[0],))
        return {
            "predicted": self.lin(x + noise) * time[:, None],
            "noise": noise,
            "time": time,
            "rows": torch.arange(x.shape[0]),
            "weights": self.table.sum() * x.new_ones(x.shape[0], 1),
            "table": self.table * 2,
            "classes": torch.arange(BATCH),
            "scale": self.table.mean(),
        }


class OneSize(nn.Module):
    """Takes no other batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(BATCH, 6), torch.arange(x.shape[0])


def test_outputs_whose_rows_grow_with_the_batch_are_told_from_others() -> None:
    made = capture(Noisy(), (torch.ones(BATCH, 6),), training=True).batch_outputs
    assert made == {"noise", "time", "rows", "weights"}


def test_a_model_that_takes_no_other_batch_has_none() -> None:
    assert capture(OneSize(), (torch.ones(BATCH, 6),), training=False).batch_outputs == frozenset()


@pytest.mark.parametrize("recipe", ["fsdp", "hsdp"])
def test_they_are_cut_where_the_batch_is(recipe: Any) -> None:
    mesh = Mesh("nodes=2,dp=2", hardware="h100")
    found = plan(Noisy(), mesh, (torch.ones(BATCH, 6),), options=Options(recipe=recipe)).outputs
    parts = {name for name, value in found.items() if value.layout.axes_on(0) == (0, 1)}
    assert parts == {"predicted", "noise", "time", "rows", "weights"}
    assert {name for name, value in found.items() if not value.layout.is_replicated} == parts


def test_they_are_as_the_user_says() -> None:
    options = Options(recipe="fsdp", outputs={"noise": {"dp": "R"}})
    found = plan(Noisy(), Mesh("dp=2"), (torch.ones(BATCH, 6),), options=options).outputs
    assert found["noise"].layout.axes_on(0) == () and found["time"].layout.axes_on(0) == (0,)


def test_they_are_whole_beside_a_batch_that_the_axes_do_not_divide() -> None:
    found = plan(Noisy(), Mesh("dp=3"), (torch.ones(BATCH, 6),), options=Options(recipe="fsdp")).outputs
    assert not any(value.layout.axes_on(0) for value in found.values())
