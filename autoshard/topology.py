"""From the meshes that users have to the mesh that passes know."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.errors import MeshError
from passes.ir.mesh import Mesh


def mesh_of(mesh: DeviceMesh | Mesh | str) -> Mesh:
    """The axes, sizes and ranks of a `DeviceMesh`, of `"dp=2,tp=4"`, or of a `Mesh` itself.

    Raises MeshError where a DeviceMesh has no axis names, or more ranks than the world.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return Mesh(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"a mesh is a DeviceMesh, a Mesh or text such as 'dp=2,tp=4', not {type(mesh).__name__}")
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
    return Mesh(tuple(mesh.mesh_dim_names), tuple(mesh.mesh.shape), ranks=ranks)
