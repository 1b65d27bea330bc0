"""Views of parameters and gradients, as some optimizers make them: refused where torch would mix up their elements."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.runtime.parameters import distributed_copy, place_of

FOUR_RANKS = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.runtime.test_dtensor_views import check

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
check(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
"""


def check(mesh: DeviceMesh) -> None:
    """Check which views of DTensors are refused once a module is sharded."""
    distributed_copy(nn.Linear(8, 8), place_of(mesh), None)
    for shape, dim in (((4, 8), 1), ((2, 4, 8), 1), ((2, 4, 8), 2)):
        with pytest.raises(RuntimeError, match=rf"mix up .* dim {dim} of .* into others"):
            _on_two_axes(mesh, shape, dim).flatten()
    for shape, dim in (((4, 8), 0), ((1, 8), 1)):
        _on_two_axes(mesh, shape, dim).flatten()
    _on_two_axes(mesh, (2, 4, 8), 2).flatten(0, 1)
    _on_two_axes(mesh, (4, 8), 1).unflatten(0, (2, 2))


def _on_two_axes(mesh: DeviceMesh, shape: tuple[int, ...], dim: int) -> DTensor:
    """Return a DTensor of which two axes shard a dim, the second first, as tensor parallelism with FSDP does."""
    placements = _StridedShard(dim, split_factor=2), Shard(dim)
    local, whole = torch.zeros(shape).chunk(4, dim)[0], torch.zeros(shape)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)


def test_views_that_torch_gets_wrong_are_refused() -> None:
    subprocess.run([sys.executable, "-c", FOUR_RANKS], check=True)
