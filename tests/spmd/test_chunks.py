"""Products in chunks, or in one operator with their collective, on real ranks and in Inductor's code: the same numbers."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import Options, Overlap, autoshard
from autoshard.runtime import shared_memory
from passes.ir.matmul_chunks.one_operator import why_not_one
from passes.matmul_ways import trials
from passes.matmul_ways.trials import ONE, Trials
from tests.spawn import run_on_ranks
from tests.spmd.oracle import relative_error


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x + self.down(torch.relu(self.up(x * self.scale)))) ** 2).mean()


@pytest.mark.slow
@pytest.mark.gloo
def test_a_step_in_parts_is_that_of_one_device() -> None:
    """Op by op, and in Inductor's code: all in chunks, and then in one operator what can be."""
    asked = [("eager", 2), ("inductor", ONE)]
    for worst, told in run_on_ranks(_step, 2, asked, timeout=300):
        assert worst < 1e-10
        assert told == [["split"] * 3, ["joined", "joined", "split"]]  # there is no operator for a sum of products


def _step(rank: int, asked: list[tuple[Any, int]]) -> tuple[float, list[list[str]]]:
    """Return the largest relative error of the loss and of the gradients, and what was made of each collective."""
    worst, told = 0.0, []
    for mode, way in asked:
        torch.manual_seed(0)
        one, x = Block().double(), torch.randn(2, 8, 8, dtype=torch.float64)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        options = Options(recipe="megatron", compile=mode, hardware="h100", overlap=Overlap(symmetric_memory=True))
        with (
            mock.patch.object(shared_memory, "DEVICES", ("cpu",)),
            mock.patch.object(trials, "WORTH", -1e9),  # of the step: whatever it costs
            mock.patch.object(
                Trials, "ways", lambda _, site, way=way: ((2 if why_not_one(site) else way,), "")
            ),
        ):
            model = autoshard(copy.deepcopy(one), mesh, (x,), options=options)
            loss, want = model(*model.shard(x)), one(x)
        loss.backward()
        want.backward()
        worst = max(worst, relative_error(loss, want))
        for name, parameter in model.named_parameters():
            gradient = one.get_parameter(name).grad
            assert gradient is not None and isinstance(parameter.grad, DTensor)
            worst = max(worst, relative_error(parameter.grad.full_tensor(), gradient))
        remarks = [remark.text for remark in model.plan.remarks if remark.pass_name == "decompose_matmuls"]
        told.append([text.partition(":")[0].partition(",")[0] for text in remarks])
    return worst, told
