"""The dims of the first input are found in outputs by the rules, also inside of a merged dim; sizes alone do not say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, check
from autoshard.capture.capture import capture
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import PlanRecord
from passes.ir.layout import Shard
from passes.search.output_dims import followed, output_dims

BATCH, LENGTH, WIDTH, HEADS = 4, 6, 8, 2
X = torch.linspace(-1, 1, BATCH * LENGTH * WIDTH).view(BATCH, LENGTH, WIDTH)


class Merging(nn.Module):
    """Returns what merges the batch with another dim, in several ways, and what has a multiple of its rows by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(BATCH * LENGTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.lin(x)
        heads = h.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return {
            "kept": h,
            "flat": h.view(-1, WIDTH),
            "elements": h.flatten(),
            "heads": heads.reshape(BATCH * HEADS, LENGTH, -1),
            "shifted": h[:, 1:].flatten(0, 1),
            "labels": [y.view(-1), y.repeat_interleave(2, 0)],
            "inside": h.transpose(0, 1).flatten(0, 1),
            "joined": torch.cat([h, h]),
            "table": self.table * h.mean(),
            "products": h.flatten(0, 1).T @ h.flatten(0, 1),
            "ones": h.new_ones(BATCH * LENGTH),
            "loss": h.square().mean(),
        }


IN_ORDER = {"kept", "flat", "elements", "heads", "shifted", "labels.0", "labels.1"}


def test_an_output_has_the_rows_of_the_batch_where_the_batch_is_its_outermost_factor() -> None:
    found = output_dims(capture(Merging(), (X, torch.ones(BATCH, LENGTH)), training=True).graph_module)
    assert {name: places[0] for name, places in found.items()} == dict.fromkeys(IN_ORDER, Shard(0))


def test_other_dims_of_the_input_are_digits_inside_of_the_batch() -> None:
    found = output_dims(capture(Merging(), (X, torch.ones(BATCH, LENGTH)), training=True).graph_module)
    assert {name: found[name].get(1) for name in ("kept", "flat", "heads", "labels.0", "shifted")} == {
        "kept": Shard(1),
        "flat": Shard(0, BATCH),
        "heads": Shard(1),
        "labels.0": Shard(0, BATCH),
        "shifted": None,
    }
    places = found["flat"]
    assert followed(Shard(0, 2), X.shape, (BATCH * LENGTH, WIDTH), places) == Shard(0, 2)
    assert followed(Shard(1, 2, 1), X.shape, (BATCH * LENGTH, WIDTH), places) == Shard(0, 2 * BATCH, 1)
    assert followed(Shard(2), X.shape, (BATCH * LENGTH, WIDTH), places) is None  # the product sums over it
    assert followed(Shard(1), X.shape, (3, LENGTH), {}) == Shard(1)


def test_a_graph_without_inputs_has_none() -> None:
    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(3) * 2

    assert output_dims(capture(Constant(), training=False).graph_module) == {}


@pytest.mark.parametrize("recipe", ["auto", "megatron"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_they_are_this_rank_s_part_by_default(recipe: Any, mesh: str) -> None:
    """A search, and a recipe that does not carry the batch, return the rows that belong to the rows of the inputs."""
    options = Options(recipe=recipe, inputs=None if recipe == "auto" else {"*": {"dp": "S(0)"}})
    made = _planned(options, mesh, axes=(0,) if recipe == "auto" else None)
    assert {name for name, value in made.outputs.items() if value.layout.axes_on(0) == (0,)} == IN_ORDER
    assert all(value.layout.is_replicated for name, value in made.outputs.items() if name not in IN_ORDER)


def test_a_sharded_sequence_is_a_digit_of_the_merged_dim() -> None:
    args, mesh = (X, torch.ones(BATCH, LENGTH)), Mesh("dp=2,cp=2", hardware="h100")
    options = Options(inputs={"*": {"dp": "S(0)", "cp": "S(1)"}})
    made = _planned(options, mesh, axes=None)
    assert made.outputs["flat"].layout.placements == (Shard(0), Shard(0, BATCH))
    assert check(Merging(), mesh, args, options=options)


def _planned(options: Options, mesh: str | Mesh, axes: tuple[int, ...] | None) -> PlanRecord:
    args, on = (X, torch.ones(BATCH, LENGTH)), mesh if isinstance(mesh, Mesh) else Mesh(mesh, hardware="h100")
    return make_plan(PlanRequest(Merging(), args, {}, on, options, batch_axes=axes)).plan
