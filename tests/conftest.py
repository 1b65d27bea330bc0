"""What tests share: a world of one process, for what needs a mesh but no second rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """Open a mesh dp=1 in a process group of this process alone, for one test: no later test finds it open."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in an __all__
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
