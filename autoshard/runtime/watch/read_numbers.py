"""Read a number from a DTensor, as `p.grad.norm().item()` does: all ranks join their parts, in a call that they agree on."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.watch.call_watch import SharedCall, Watch
from passes._torch import is_on_every_rank, local_of_dtensor, read_numbers

ADVICE = "each rank holds a part of the number: read it on every rank, as by norm = norm.item(), and print or log it on one"


def read_whole_numbers(device_mesh: DeviceMesh, watch: Watch) -> None:
    """Let `item()`, `bool()` and `float()` of DTensors on a mesh return one device's number; all its ranks call them together."""
    _WATCHES[device_mesh] = watch
    read_numbers(_whole)


def _whole(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor; on a mesh that has no sharded model, this rank's part, as torch does."""
    device_mesh, watch = tensor.device_mesh, _WATCHES.get(tensor.device_mesh)
    if watch is None or is_on_every_rank(tensor):
        return local_of_dtensor(tensor)
    traits = ("dtype", str(tensor.dtype)), ("placements", str(tensor.placements))
    with watch.call(SharedCall("item() on a DTensor", traits=traits, is_of_model=False, advice=ADVICE)):
        for axis in range(device_mesh.ndim):
            watch.cover(device_mesh.get_group(axis))
        return tensor.full_tensor()


_WATCHES: dict[DeviceMesh, Watch] = {}  # of the last model that was sharded on each mesh
