"""A profile on real ranks says of each collective and each module what was predicted and what it took."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import InputError, Options, autoshard
from tests.models import build
from tests.spawn import run_on_ranks


def _profile(rank: int) -> dict[str, Any]:
    case = build("mlp", dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autoshard(case.model, mesh, case.args, options=Options(recipe="fsdp", compile="eager"))
    found = model.profile(*model.shard(*case.args))
    steps = {run.id for one in found.collectives for run in one.runs}
    return {
        "text": str(found),
        "unknown": steps - {one.id for one in model.plan.collectives},
        "left out": {one.id for one in model.plan.collectives} - steps,
        "again": all(one.predicted > 0 and one.measured > 0 for one in found.collectives),
        "regions": {one.fqn for one in found.regions},
        "step": found.step,
        "sum": sum(one.measured for one in (*found.collectives, *found.regions)),
        "gradients": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        "hardware": (found.hardware == mesh_hardware(model), found.hardware.inside.bandwidth),
    }


def mesh_hardware(model: Any) -> Any:
    return model.plan.mesh.hardware


@pytest.mark.gloo
@pytest.mark.slow
def test_every_collective_and_module_has_both_times() -> None:
    for found in run_on_ranks(_profile, 2):
        assert not found["unknown"] and not found["left out"] and found["again"]
        assert {"layers.0", "layers.2"} <= found["regions"]
        assert 0 < found["step"] < 10 * found["sum"]
        assert found["gradients"] == []
        assert not found["hardware"][0] and found["hardware"][1] > 0
        assert "all_gather over dp" in found["text"] and "recalibrated: " in found["text"]


def test_a_profile_needs_a_program(one_rank: DeviceMesh) -> None:
    model = autoshard(torch.nn.Linear(4, 4), one_rank, options=Options(recipe="fsdp"))
    with pytest.raises(InputError) as caught:
        model.profile(torch.randn(2, 4))
    assert str(caught.value) == "nothing was captured for this mode yet: call the model once before"


def test_a_profile_on_one_rank_leaves_the_model_as_it_is(one_rank: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = autoshard(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)),
        one_rank,
        (torch.randn(6, 4),),
        options=Options(recipe="fsdp", compile="eager"),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = model.profile(torch.randn(6, 4))
    assert found.collectives == () and {one.fqn for one in found.regions} >= {"0", "1"}
    for name, value in model.state_dict().items():
        assert torch.equal(getattr(value, "_local_tensor", value), getattr(before[name], "_local_tensor", before[name])), name
