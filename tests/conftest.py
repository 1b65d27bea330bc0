"""What every test runs in: no collective of any plan is anonymous. And a world of one process, for what needs a mesh but no
second rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule

from autoshard.planner import evaluation
from autoshard.plans.collectives import Collective, collectives_of
from passes.ir.mesh import Mesh
from tests.named import check_named


@pytest.fixture(autouse=True)
def named_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective of each plan that a test makes, of candidates that are not chosen too, says where it comes from."""

    def checked(gm: GraphModule, mesh: Mesh) -> tuple[Collective, ...]:
        found = collectives_of(gm, mesh)
        check_named(found, gm)
        return found

    monkeypatch.setattr(evaluation, "collectives_of", checked)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh dp=1 in a process group of this process alone, for one test: no later test finds it open."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
