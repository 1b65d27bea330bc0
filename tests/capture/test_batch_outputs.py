"""Outputs with the rows of the batch are this rank's rows, those with as many rows by chance are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, plan
from autoshard.capture.capture import capture
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import PlanRecord

BATCH = 4


class Noisy(nn.Module):
    """Returns what diffusion does, noise and times that it draws; and what has as many rows as the batch by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.table = nn.Linear(6, 6), nn.Parameter(torch.ones(BATCH, 5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        print("drawing")
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


def test_outputs_whose_rows_grow_with_the_batch_are_told_from_others(capsys: pytest.CaptureFixture[str]) -> None:
    made = capture(Noisy(), (torch.ones(BATCH, 6),), training=True).batch_outputs
    assert {name for name, grows in made.items() if grows} == {"predicted", "noise", "time", "rows", "weights"}
    assert {name for name, grows in made.items() if grows is False} == {"table", "classes"}
    assert capsys.readouterr().out == ""


def test_rows_of_a_model_that_takes_no_other_batch_are_not_known() -> None:
    args = (torch.ones(BATCH, 6),)
    assert capture(OneSize(), args, training=False).batch_outputs == {"1": None}
    (remark,) = plan(OneSize(), Mesh("dp=2"), args, options=Options(recipe="ddp")).remarks
    assert "every rank gets all of it" in remark.text and "{'1': {axis: 'S(0)'}}" in remark.text
    told = Options(recipe="ddp", outputs={"1": {"dp": "S(0)"}})
    assert plan(OneSize(), Mesh("dp=2"), args, options=told).remarks == ()


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


class Correlation(nn.Module):
    """Returns statistics of a batch, which have as many rows as it by chance, and rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, BATCH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.lin(x)
        return {"rows": y, "mean": y.mean(0), "products": y.T @ y, "first": y.argmax(0)}


@pytest.mark.parametrize("recipe", ["auto", "fsdp", "megatron"])
def test_statistics_of_a_batch_are_whole_also_if_they_have_as_many_rows(recipe: Any) -> None:
    args = (torch.ones(BATCH, 6),)
    known = {"rows": True, "mean": False, "products": False, "first": False}
    assert capture(Correlation(), args, training=True).batch_outputs == known
    options = Options(recipe=recipe, inputs=None if recipe == "auto" else {"x": {"dp": "S(0)"}})
    made = planned_for_ranks(Correlation(), options)
    assert {name for name, value in made.outputs.items() if not value.layout.is_replicated} == {"rows"}


class Pairs(nn.Module):
    """Scores all pairs of two batches, as CLIP does: a row for each sample of one, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.one(x) @ self.other(2 - x).T
        return {"by_one": scores, "by_other": scores.T, "pairs": torch.stack([scores.T, scores], -1)}


@pytest.mark.parametrize("recipe", ["auto", "ddp", "fsdp", "megatron"])
def test_scores_of_all_pairs_are_split_by_rows(recipe: Any) -> None:
    options = Options(recipe=recipe, inputs=None if recipe == "auto" else {"x": {"dp": "S(0)"}})
    made = planned_for_ranks(Pairs(), options)
    assert {value.layout.axes_on(0) for value in made.outputs.values()} == {(0,)}


class Large(nn.Module):
    """A product that is faster on parts of the batch, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2048, 2048)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x), torch.randn_like(x)


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_they_follow_the_batch_where_a_search_splits_it(mesh: str) -> None:
    args = (torch.ones(65536, 2048, device="meta"),)
    with torch.device("meta"):
        model = Large()
    made = plan(model, Mesh(mesh, hardware="h100"), args)
    split = made.inputs["x"].layout.axes_on(0)
    assert split and all(output.layout.axes_on(0) == split for output in made.outputs.values())


def test_what_has_as_many_rows_by_chance_is_whole_where_a_search_splits_the_batch() -> None:
    made = planned_for_ranks(Noisy())
    assert made.solution is not None
    parts = {name for name, value in made.outputs.items() if not value.layout.is_replicated}
    assert parts == {"predicted", "noise", "time", "rows", "weights"}


@pytest.mark.parametrize("recipe", ["auto", "megatron"])
def test_a_rank_gets_its_rows_also_where_products_are_split_by_columns(recipe: Any) -> None:
    """Splitting a small layer by its columns is fastest on paper; the caller splits the batch over `dp` all the same."""
    options = Options(recipe=recipe, inputs=None if recipe == "auto" else {"input": {"dp": "S(0)"}})
    made = planned_for_ranks(nn.Sequential(nn.Linear(6, 6)), options)
    assert made.outputs["output"].layout == made.inputs["input"].layout
    assert made.outputs["output"].layout.axes_on(0) == (0,)


def planned_for_ranks(model: nn.Module, options: Options | None = None) -> PlanRecord:
    """Return the plan of a call whose batch the caller splits over `dp`."""
    mesh, args = Mesh("dp=2", hardware="h100"), (torch.ones(BATCH, 6),)
    axes = (0,) if options is None or options.recipe == "auto" else None
    return make_plan(PlanRequest(model, args, {}, mesh, options or Options(), batch_axes=axes)).plan


class Embeds(nn.Module):
    """Returns the table that it reads, which has as many rows as the batch by chance, in parts of `megatron`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(BATCH, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(x), self.table.weight * 2


def test_what_has_as_many_rows_by_chance_is_whole_beside_products_in_parts() -> None:
    mesh, options = Mesh("dp=2", hardware="h100"), Options(recipe="megatron", inputs={"x": {"dp": "S(0)"}})
    made = plan(Embeds(), mesh, (torch.arange(BATCH),), options=options)
    assert {name: value.layout.axes_on(0) for name, value in made.outputs.items()} == {"0": (0,), "1": ()}
