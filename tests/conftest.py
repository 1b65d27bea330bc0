"""Provide a world of one process, for tests that need a mesh but no second rank, and settings that save time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Pytest adds its handler to loggers that do not propagate, which would turn on PyTorch's structured trace: every graph
# would be written as text.
logging.getLogger("torch.__trace").propagate = True

gc.set_threshold(50_000, 20, 20)  # also while tests are collected, which takes a third less CPU


def pytest_collection_finish() -> None:
    """Let the garbage collector never walk what was imported and collected: with rare collections, this saves 6 % of the CPU."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """Open a mesh dp=1 in a process group of this process alone, for one test: no later test finds it open."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in an __all__
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
