"""The search prices the step that the options ask for."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, Overlap, plan
from passes.hardware.hardware import hardware_named

DIM, HIDDEN = 1024, 4096
MESH = Mesh("dp=4", hardware="h100")


def model_on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(DIM, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, DIM, bias=False))


def searched(model: nn.Module, optimizer: Literal["adamw", "sgd"] | None = "adamw") -> tuple[float, float, int]:
    """Return objective and bound in seconds, and the peak of memory in bytes."""
    found = plan(model, MESH, (torch.empty(512, DIM, device="meta"),), options=Options(optimizer=optimizer))
    assert found.search is not None and found.cost is not None
    assert found.search.objective is not None and found.search.bound is not None
    assert found.search.objective == pytest.approx(found.cost.step_time, rel=0.05)
    return found.search.objective, found.search.bound, found.cost.peak_memory


def test_objective_and_bound_follow_the_optimizer() -> None:
    """Per byte of a stored parameter, AdamW moves seven, SGD three, and no optimizer none."""
    assert MESH.hardware is not None
    (adamw, *bounds, roomy), (sgd, below, smaller), (none, lowest, _) = (
        searched(model_on_meta(), one) for one in ("adamw", "sgd", None)
    )
    stored = (adamw - sgd) * MESH.hardware.memory_bandwidth / 4
    assert sgd - none == pytest.approx(3 * stored / MESH.hardware.memory_bandwidth, rel=1e-3)
    assert stored <= 2 * DIM * HIDDEN * 4 * 1.001 and smaller < roomy
    assert bounds[0] > below > lowest


def test_a_frozen_parameter_costs_no_update() -> None:
    model = model_on_meta()
    whole = searched(model)[0]
    model[0].requires_grad_(False)
    assert searched(model)[0] < 0.8 * whole


def deep(mesh: Mesh, batch: int, **options: Any) -> tuple[float, float, float]:
    """Return objective, bound and simulated step of eight equal layers."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(layers=nn.Sequential(*(Layer() for _ in range(8)))))
    found = plan(model, mesh, (torch.empty(batch, DIM, device="meta"),), options=Options(**options))
    assert found.search is not None and found.cost is not None
    assert found.search.objective is not None and found.search.bound is not None
    return found.search.objective, found.search.bound, found.cost.step_time


class Layer(nn.Module):
    """Two products with a pointwise kernel between them, whose operand the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def test_objective_and_bound_follow_the_overlap() -> None:
    """Without it, all communication is exposed: what hid beside kernels comes on top."""
    hidden, exposed = (deep(MESH, 1 << 15, overlap=overlap) for overlap in (True, False))
    assert exposed[0] == pytest.approx(exposed[2], rel=0.05) and hidden[0] == pytest.approx(hidden[2], rel=0.05)
    assert exposed[0] > 1.02 * hidden[0] and exposed[1] > 1.02 * hidden[1]


def test_objective_and_bound_follow_the_buckets() -> None:
    """On a network each message costs its latency, so one for each parameter takes longer."""
    network = Mesh("dp=32", hardware="h100")
    joined, apart = (deep(network, 1 << 12, overlap=Overlap(bucket_bytes=nbytes)) for nbytes in (400 << 20, 0))
    assert apart[0] > 1.2 * joined[0] and apart[1] > 1.2 * joined[1]


def test_objective_and_bound_follow_the_contention() -> None:
    """Kernels are slower beside messages that hide behind them."""
    free, slowed = (
        deep(Mesh("dp=4", hardware=replace(hardware_named("h100"), contention=part)), 1 << 15) for part in (0.0, 0.7)
    )
    assert free[0] == pytest.approx(free[2], rel=0.05) and slowed[0] == pytest.approx(slowed[2], rel=0.05)
    assert slowed[0] > 1.005 * free[0] and slowed[1] > 1.005 * free[1]


def test_objective_and_bound_follow_mixed_precision() -> None:
    """Products in bfloat16 are faster, and move half the bytes."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    whole, half = (deep(MESH, 1 << 15, mixed_precision=one) for one in (None, policy))
    assert half[0] == pytest.approx(half[2], rel=0.1)
    assert half[0] < 0.7 * whole[0] and half[1] < 0.7 * whole[1]


def test_objective_and_bound_follow_recomputation() -> None:
    """Each layer runs its forward once more under `"block"`."""
    kept, again = (deep(MESH, 1 << 15, recompute=one) for one in ("none", "block"))
    assert again[0] == pytest.approx(again[2], rel=0.05)
    assert again[0] > 1.1 * kept[0] and again[1] > 1.1 * kept[1]


def test_objective_bound_and_choice_follow_the_memory_that_is_left() -> None:
    """Gather again in the backward what was kept, where others take a part of the device."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(layers=nn.Sequential(*(Layer() for _ in range(8)))))
    roomy = plan(model, MESH, (torch.empty(1 << 13, DIM, device="meta"),), options=Options(recompute="none"))
    assert roomy.cost is not None and roomy.search is not None
    assert roomy.search.objective is not None and roomy.search.bound is not None
    tight = roomy.replan(memory_limit=int(0.85 * roomy.cost.peak_memory), prove=True)
    assert tight.cost is not None and tight.search is not None
    assert tight.search.objective is not None and tight.search.bound is not None
    assert tight.search.objective == pytest.approx(tight.cost.step_time, rel=0.05)
    assert tight.search.objective > 1.01 * roomy.search.objective and tight.search.bound > 1.01 * roomy.search.bound
    assert tight.cost.peak_memory <= 0.85 * roomy.cost.peak_memory
    assert (roomy.search.chosen, tight.search.chosen) == ("zero2", "fsdp")
