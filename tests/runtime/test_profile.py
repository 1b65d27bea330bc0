"""A profile on real ranks says of each collective and each module what was predicted and what it took."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import Mesh, Options, Overlap, autoshard
from autoshard.plans.collectives import Collective
from autoshard.runtime.profiling import CollectiveTime, Profile, RegionTime
from passes.ir.graph import Origin
from tests.models import mlp
from tests.spawn import run_on_ranks


def _profile(rank: int) -> dict[str, Any]:
    case = mlp(sizes=(64, 1024, 48, 16), batch=256)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = Options(recipe="fsdp", compile="eager", overlap=Overlap(bucket_bytes=0))
    model = autoshard(case.model, mesh, case.args, options=options)
    found = model.profile(*model.shard(*case.args))
    steps = {run.id for one in found.collectives for run in one.runs}
    return {
        "text": str(found),
        "unknown": steps - {one.id for one in model.plan.collectives},
        "left out": {one.id for one in model.plan.collectives} - steps,
        "again": all(one.predicted > 0 and one.measured > 0 for one in found.collectives),
        "regions": {one.fqn for one in found.regions},
        "step": found.step,
        "sum": sum([*(one.measured for one in found.collectives), *(one.measured for one in found.regions)]),
        "gradients": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        "hardware": (found.hardware == mesh_hardware(model), found.hardware.inside.bandwidth),
    }


class Classifier(torch.nn.Module):
    """The model of README: two linears of unlike names, whose messages have one size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.down(torch.nn.functional.gelu(self.up(x))), labels)


def _profile_of_readme(rank: int) -> list[str]:
    batch = torch.randn(64, 32), torch.randint(10, (64,))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autoshard(Classifier(), mesh, args=batch, options=Options(recipe="fsdp", compile="eager"))
    return str(model.profile(*model.shard(*batch))).splitlines()


@pytest.mark.gloo
@pytest.mark.slow
def test_messages_of_modules_with_unlike_names_share_a_line() -> None:
    for lines in run_on_ranks(_profile_of_readme, 2):
        assert [" ".join(line.split()[:6]) for line in lines if "up, down" in line]


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


def test_a_profile_reads_as_a_table() -> None:
    mesh = Mesh("dp=2", hardware="h100")
    assert mesh.hardware is not None
    message = CollectiveTime("all_gather_1", "all_gather", ("dp",), 6 << 20, False, (), 1e-4, 2e-4)
    regions = (RegionTime("layers.0.wq", False, 3, 1e-3, 1.5e-3), RegionTime("layers.1.wq", False, 3, 1e-3, 1.5e-3))
    found = Profile(mesh, 2e-3, 3e-3, (message, message), regions, mesh.hardware)
    assert_expected_inline(str(found), """\
profile on 2 ranks (dp=2); each call alone and not fused, on the slowest rank
                                                         predicted  measured  ratio
step, as it runs                                           2.00 ms   3.00 ms   1.50
2 x all_gather over dp, 6.0 MiB  forward                    200 us    400 us   2.00
compute, 6 calls                 forward  layers.0-1.wq    2.00 ms   3.00 ms   1.50
not recalibrated: products and messages are too small or too alike to tell of the hardware""")
    link = replace(mesh.hardware.inside, bandwidth=float(1 << 30), latency=1e-5)
    run = Collective("all_gather_1", "all_gather", ("dp",), 6 << 20, False, False, Origin(), "fsdp: gathered for use")
    modules = ("up", "down.0", "down.1", "norm", "head")
    unlike = [replace(message, runs=(replace(run, origin=Origin(fqn=fqn)),)) for fqn in modules]
    assert "forward  up, down.0-1, norm, ..." in str(replace(found, collectives=tuple(unlike)))
    other = str(replace(found, hardware=replace(mesh.hardware, flops=(("f32", 1e12),), inside=link)))
    assert other.splitlines()[-1] == "recalibrated: f32 1000 GFLOP/s; inside 1.0 GiB/s, 10.0 us a step"
