"""Notice that an optimizer trains a sharded model and parameters beside it, whose gradients are of a rank's part of the batch."""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoshard.capture.signature import format_tensor
from autoshard.runtime.agreement import exchange
from autoshard.runtime.process_groups import MeshGroups
from autoshard.runtime.watch.call_watch import SharedCall

_log = logging.getLogger("autoshard.programs")

TOLERANCE = 1e-3  # of a gradient's norm; kernels that add in any order make a smaller difference, another part a larger one

_GROUPS: dict[DeviceMesh, MeshGroups] = {}  # of the last model that was sharded on each mesh
_compared: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def compare_other_parameters(device_mesh: DeviceMesh, groups: MeshGroups) -> None:
    """Let optimizers of models on a mesh warn of plain parameters beside them for which ranks have found different gradients."""
    if not _GROUPS:
        register_optimizer_step_post_hook(_compare)
    _GROUPS[device_mesh] = groups


def _compare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Compare gradients once per optimizer; after its step, as a closure computes them in it."""
    if torch.compiler.is_compiling() or optimizer in _compared:
        return
    held = [one for group in optimizer.param_groups for one in group["params"]]
    meshes = [one.device_mesh for one in held if isinstance(one, DTensor) and one.device_mesh in _GROUPS]
    others = [one for one in held if not isinstance(one, DTensor)]
    if not meshes or not others:
        return
    _compared.add(optimizer)
    groups = _GROUPS[meshes[0]]
    with groups.watch.call(SharedCall("the first step of an optimizer", is_of_model=False)):
        found = exchange(groups, [_measured(one.grad) for one in others])
    for rank, of_rank in zip(groups.mesh.ranks, found, strict=True):
        pairs = zip(others, found[0], of_rank, strict=False)
        unlike = next((one for one, first, second in pairs if not _are_alike(first, second)), None)
        if unlike is not None:
            if groups.rank == groups.mesh.ranks[0]:
                _warn(unlike, groups.rank, rank)
            return


def _warn(parameter: torch.Tensor, first: int, second: int) -> None:
    _log.warning(
        "an optimizer holds %s, a parameter that is not of the sharded model, and ranks %d and %d have different gradients of "
        "it: each has that of its part of the batch, so that ranks train it apart. Make it a part of the model, such as a module "
        "that holds model and loss, or average its gradient over the ranks before each step",
        format_tensor(parameter.shape, parameter.dtype),
        first,
        second,
    )


def _measured(gradient: torch.Tensor | None) -> tuple[float, float] | None:
    """Return the norm and the sum of a gradient."""
    if gradient is None:
        return None
    values = gradient.detach().to_dense().double() if gradient.layout != torch.strided else gradient.detach().double()
    return float(values.norm()), float(values.sum())


def _are_alike(first: tuple[float, float] | None, second: tuple[float, float] | None) -> bool:
    if first is None or second is None:
        return first is second
    pairs = zip(first, second, strict=True)
    return all(abs(one - other) <= TOLERANCE * max(first[0], second[0]) or not math.isfinite(one + other) for one, other in pairs)
