"""A plan that pads its batch by a third runs on real ranks, with the batch that it was made for and with others."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Mesh, Options, ShardingPlan, autoshard, plan
from tests.extended import extended
from tests.planner.test_padded_batches import CLASSES, Convolutions
from tests.planner.test_padded_dims import Mlp
from tests.spawn import run_on_ranks

BATCHES = (6, 8, 5, 6, 1)  # that of the plan; one that all axes divide, odd ones


def _train(rank: int, text: str) -> float:
    """Return how far losses and gradients are from one device's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    one, worst = Convolutions(5).double(), 0.0
    model = autoshard(one, mesh, plan=ShardingPlan.from_json(text), options=Options(compile="eager"))
    for batch in BATCHES:
        args = torch.randn(batch, 3, 48, 48, dtype=torch.float64), torch.randint(CLASSES, (batch,))
        losses = model(*model.shard(*args)), one(*args)
        for loss in losses:
            loss.backward()
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        worst = max(worst, *(float((mine - want).detach().abs().max()) for mine, want in (losses, *pairs)))
    return worst


@pytest.mark.gloo
@pytest.mark.slow
def test_a_padded_plan_from_a_file_runs_with_batches_of_any_size() -> None:
    args = torch.empty(6, 3, 48, 48, dtype=torch.float64), torch.zeros(6, dtype=torch.long)
    found = plan(Convolutions(5).double(), Mesh("dp=2,tp=2", hardware="h100"), args)
    assert found.padded_axes == ("dp", "tp")
    assert max(run_on_ranks(_train, 4, found.to_json())) < 1e-10


WIDTHS, ROWS = (1000, 3001, 1500, 777), (1000, 98, 97)


def _train_padded_for_one_axis(rank: int, text: str | None) -> tuple[float, list[tuple[str, ...]]]:
    """Return how far losses and gradients are from one device's, and the axes that each program has its dims padded for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one, worst = Mlp(WIDTHS).double(), 0.0
    given = None if text is None else ShardingPlan.from_json(text)
    model = autoshard(one, mesh, plan=given, options=Options(compile="eager", hardware="h100"))
    for rows in ROWS:
        x = torch.randn(rows, WIDTHS[0], dtype=torch.float64)
        losses = model(*model.shard(x)), one(x)
        for loss in losses:
            loss.backward()
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        worst = max(worst, *(float((mine - want).detach().abs().max()) for mine, want in (losses, *pairs)))
    return worst, [made.plan.compute_axes for made in model.programs]


@cache
def _padded_for_one_axis() -> ShardingPlan:
    return plan(Mlp(WIDTHS).double(), Mesh("dp=2", hardware="h100"), (torch.empty(ROWS[0], WIDTHS[0], dtype=torch.float64),))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("is_given", [extended(True), False])
def test_a_plan_with_dims_padded_for_an_axis_named_for_data_runs_with_batches_of_any_size(is_given: bool) -> None:
    found = _padded_for_one_axis()
    assert found.compute_axes == ("dp",) and found.recipes == (None,)
    for worst, axes in run_on_ranks(_train_padded_for_one_axis, 2, found.to_json() if is_given else None):
        assert worst < 1e-10 and set(axes) == {("dp",)}
