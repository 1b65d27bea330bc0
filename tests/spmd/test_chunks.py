"""Products in chunks, on real ranks and in Inductor's code: the same numbers, in the order of the graph."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import passes.decompose_matmuls
from autoshard import Options, autoshard
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
def test_a_step_in_chunks_is_that_of_one_device() -> None:
    for worst, chunks in run_on_ranks(_step, 2, ["eager", "inductor"], timeout=300):
        assert worst < 1e-10
        assert chunks == 3


def _step(rank: int, modes: list[Any]) -> tuple[float, int]:
    """The largest relative error of the loss and of the gradients, and how many collectives were cut."""
    worst = 0.0
    for mode in modes:
        torch.manual_seed(0)
        one, x = Block().double(), torch.randn(2, 8, 8, dtype=torch.float64)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        options = Options(recipe="megatron", compile=mode, hardware="h100")
        with (
            mock.patch.object(passes.decompose_matmuls, "WORTH", -1e9),  # of the step: whatever it costs
            mock.patch.object(passes.decompose_matmuls.DecomposeMatmuls, "_ways", lambda *_: ((2,), "chunks")),
        ):
            model = autoshard(copy.deepcopy(one), mesh, (x,), options=options)
            loss, want = model(model.shard(x)), one(x)
        loss.backward()
        want.backward()
        worst = max(worst, relative_error(loss, want))
        for name, parameter in model.named_parameters():
            gradient = one.get_parameter(name).grad
            assert gradient is not None and parameter.grad is not None
            worst = max(worst, relative_error(parameter.grad.full_tensor(), gradient))
        told = [remark.text for remark in model.plan.remarks if remark.pass_name == "decompose_matmuls"]
    return worst, len(told)
