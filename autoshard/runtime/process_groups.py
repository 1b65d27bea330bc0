"""Register process groups of a mesh under names that are equal on every rank.

A collective in a graph names its group. PyTorch's name of a group differs from rank to rank, and so would the graphs;
`Mesh.group_name` does not, so every rank registers its own group under it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from autoshard.runtime.watch.call_watch import Watch
from autoshard.runtime.watch.read_numbers import read_whole_numbers
from passes._torch import (
    group_timeout,
    mend_gathers,
    new_group,
    register_group,
    registered_group,
    unregister_group,
)
from passes.errors import MeshError
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class MeshGroups:
    """The groups that this rank is in, one per registered set of axes, and a control group for messages between ranks.
    """

    device_mesh: DeviceMesh
    mesh: Mesh
    control: dist.ProcessGroup  # all ranks of the mesh, gloo: carries Python objects, never tensors of a step
    names: tuple[str, ...]  # registered, in the order of creation
    watch: Watch

    @property
    def rank(self) -> int:
        """Return the global rank of this process."""
        return dist.get_rank()

    def close(self) -> None:
        """Unregister the names; `torch.distributed.destroy_process_group` destroys the groups themselves."""
        for name in self.names:
            if registered_group(name) is not None:
                unregister_group(name)


def axes_used(graphs: Iterable[GraphModule], mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Return the sets of axes that the collectives of `graphs` run over, in an order that is equal on all ranks."""
    found: set[tuple[str, ...]] = set()
    for gm in graphs:
        for node in gm.graph.nodes:
            found.update(_axes_of(argument, mesh) for argument in node.args if _is_group_name(argument))
            found.update(_axes_of(value, mesh) for value in node.kwargs.values() if _is_group_name(value))
    return tuple(sorted(found, key=lambda axes: tuple(mesh.index(axis) for axis in axes)))


def _is_group_name(argument: object) -> bool:
    return isinstance(argument, str) and argument.startswith("autoshard:")


def _axes_of(argument: object, mesh: Mesh) -> tuple[str, ...]:
    assert isinstance(argument, str)
    return mesh.axes_of_group(argument)


def open_groups(
    device_mesh: DeviceMesh,
    mesh: Mesh,
    axes: Iterable[tuple[str, ...]] = (),
    *,
    model: str = "model",
    rank_timeout: float | None = None,
) -> MeshGroups:
    """Register a group for each set of axes; all ranks of the mesh must call it with the same sets.

    Ranks outside the mesh need not call it. Groups of one axis are the device mesh's own; others are made with its
    timeout. Raises MeshError if the ranks of a group do not ascend: torch sorts them, and a rank's place in the group
    would no longer be its coordinate; and for a process group that sends nothing.
    """
    if device_mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh} of ranks {list(mesh.ranks)}")
    if dist.get_backend(device_mesh.get_group(0)) == "fake":
        raise MeshError(
            "the process group is a fake one, which sends nothing between ranks; train under torchrun with gloo or nccl, or call "
            f"autoshard.plan(model, Mesh('{mesh}'), args), which needs no process group"
        )
    mend_gathers(device_mesh.device_type)
    timeout = group_timeout(device_mesh.get_group(0))
    watch = Watch(model, mesh.ranks, limit=timeout.total_seconds() if rank_timeout is None else rank_timeout)
    read_whole_numbers(device_mesh, watch)
    control = new_group(mesh.ranks, timeout=timeout, backend="gloo")
    return add_groups(MeshGroups(device_mesh, mesh, control, (), watch), axes)


def add_groups(groups: MeshGroups, axes: Iterable[tuple[str, ...]]) -> MeshGroups:
    """Register further sets of axes, those of a program captured later."""
    names = list(groups.names)
    for subset in axes:
        name = groups.mesh.group_name(subset)
        group = registered_group(name)
        if group is None:
            group = _group(groups.device_mesh, groups.mesh, subset, group_timeout(groups.device_mesh.get_group(0)))
            register_group(name, group)
            names.append(name)
        groups.watch.cover(group)
    return replace(groups, names=tuple(names))


def _group(device_mesh: DeviceMesh, mesh: Mesh, axes: tuple[str, ...], timeout: timedelta) -> dist.ProcessGroup:
    ranks = _ranks_of_group(mesh, axes)
    if list(ranks) != sorted(ranks):
        raise MeshError(f"axes {', '.join(axes)} of mesh {mesh} join ranks {list(ranks)}; list them in ascending order")
    if len(axes) == 1:
        return device_mesh.get_group(mesh.index(axes[0]))
    return new_group(ranks, timeout=timeout)


def _ranks_of_group(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    place = mesh.ranks.index(dist.get_rank())
    own = next(group for group in mesh.groups(axes) if place in group)
    return tuple(mesh.ranks[member] for member in own)
