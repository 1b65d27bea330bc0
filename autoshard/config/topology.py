"""Convert the mesh that a user gives to a `Mesh` of the passes, and find the figures of the present device."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.config.validation import shown
from passes.errors import MeshError
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.mesh import Mesh

_RACK_WIDE = ("gb200",)  # NVLink joins GPUs of several hosts


def mesh_of(mesh: DeviceMesh | Mesh | str, hardware: str | Hardware | None = "auto") -> Mesh:
    """Return the axes, sizes, ranks and hardware of a `DeviceMesh`, of `"dp=2,tp=4"`, or of a `Mesh` itself.

    A `Mesh` that names its hardware is planned for that. `hardware`, from the options, is used for a `Mesh` that names
    none, and for a DeviceMesh instead of its device's preset. Raises MeshError if both name some and they differ, if a
    DeviceMesh has no axis names, or if it has more ranks than the world.
    """
    if isinstance(mesh, Mesh):
        _check_one_hardware(mesh, hardware)
        return mesh
    if isinstance(mesh, str):
        return Mesh(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"a mesh is a DeviceMesh, a Mesh or text such as 'dp=2,tp=4', not {shown(mesh)}")
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"the axes of {mesh} have no names; give them: "
            "init_device_mesh(device_type, shape, mesh_dim_names=('dp', 'tp'))"
        )
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    world = dist.get_world_size() if dist.is_initialized() else len(ranks)
    if len(ranks) > world:
        raise MeshError(
            f"the mesh has {len(ranks)} ranks but the world has {world}; start {len(ranks)} processes "
            f"(torchrun --nproc-per-node {len(ranks)} ...), or make the mesh smaller"
        )
    hardware = hardware_of(mesh.device_type)
    return Mesh(tuple(mesh.mesh_dim_names), tuple(mesh.mesh.shape), ranks=ranks, hardware=hardware)


def _check_one_hardware(mesh: Mesh, hardware: str | Hardware | None) -> None:
    if mesh.hardware is None or hardware == "auto":
        return
    requested = hardware_named(hardware) if isinstance(hardware, str) else hardware
    if requested != mesh.hardware:
        name = None if requested is None else requested.name
        raise MeshError(
            f"Mesh(..., hardware={mesh.hardware.name!r}) and Options(hardware={name!r}) name different hardware; remove one: "
            "the mesh's is for planning without devices, the options' for a DeviceMesh or a mesh that names none"
        )


def equipped(mesh: Mesh, hardware: str | Hardware | None, device_type: str) -> Mesh:
    """Return `mesh` with the requested hardware; `"auto"` is its own, else this machine's (None if that is unknown)."""
    if hardware != "auto":
        return mesh.on(hardware_named(hardware) if isinstance(hardware, str) else hardware)
    if mesh.hardware is not None:
        return mesh
    found = hardware_of("cuda" if torch.cuda.is_available() else device_type)
    return mesh if found is None else mesh.on(found)


def hardware_of(device_type: str) -> Hardware | None:
    """Return the figures of this process's device from the preset of its name; None for a device without a preset.

    For a GPU, the memory is at most what the device reports, and a node has as many devices as torchrun starts
    processes on it.
    """
    if device_type == "cpu":
        return hardware_named("cpu")
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    preset = preset_of(torch.cuda.get_device_name())
    if preset is None:
        return None
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", preset.node_size))
    node_size = preset.node_size if preset.name in _RACK_WIDE else min(preset.node_size, processes)
    return replace(preset, memory_bytes=min(preset.memory_bytes, memory), node_size=node_size)


def preset_of(device_name: str) -> Hardware | None:
    """Return the preset of a GPU as CUDA names it, such as "NVIDIA H100 80GB HBM3"."""
    name = device_name.lower()
    if "a100" in name and "pcie" in name:
        return hardware_named("a100-pcie")
    known = ("gb200", "b200", "h200", "h100", "a100")  # gb200 contains b200
    return next((hardware_named(preset) for preset in known if preset in name), None)
