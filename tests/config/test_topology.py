"""What is known of the machine at hand."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Mesh
from autoshard.config.topology import hardware_of, mesh_of, preset_of


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", None),
    ],
)
def test_a_gpu_is_known_by_its_name(device: str, preset: str | None) -> None:
    found = preset_of(device)
    assert (found and found.name) == preset


def test_a_device_mesh_knows_its_machine(one_rank: DeviceMesh) -> None:
    assert mesh_of(one_rank) == Mesh("dp=1", hardware="cpu")


def test_a_device_without_figures_leaves_the_mesh_without() -> None:
    assert hardware_of("mps") is None
    assert mesh_of("dp=2") == Mesh("dp=2")
