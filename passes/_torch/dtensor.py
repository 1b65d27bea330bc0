"""DTensor: placements, specs, and DTensors made without checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as DPlacement
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

_REQUIRES_GRAD = attrgetter("requires_grad")


def required_gradients(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Return whether each tensor requires a gradient. Asking a DTensor takes half the time where its `__torch_function__`,
    which does nothing, is not looked up."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(map(_REQUIRES_GRAD, tensors))


def strided_shard(dim: int, factor: int) -> DPlacement:
    """Return the placement that shards each of `factor` blocks of the dim separately."""
    return _StridedShard(dim, split_factor=factor)


def shard_of(placement: DPlacement) -> tuple[int, int] | None:
    """Return dim and number of blocks of a shard (1 block if it is contiguous), None for other placements."""
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, DShard) else None


def dtensor_spec(
    device_mesh: DeviceMesh, placements: tuple[DPlacement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a contiguous tensor of global `shape`."""
    stride = torch.empty(shape, device="meta").stride()
    # torch can read a `_StridedShard` as an order of axes; the flag says where it is none.
    is_order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, device_mesh) is not None
    return DTensorSpec(
        device_mesh,
        placements,
        TensorMeta(torch.Size(shape), stride, dtype),
        use_strided_shard_as_shard_order=None if is_order else False,
    )


def dtensor_of_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor around this rank's part, without communication, checks or autograd."""
    # Without __init__, which does nothing but doubles the time: this runs once per gradient and step.
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def local_of_dtensor(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


def is_on_every_rank(tensor: DTensor) -> bool:
    """Return whether each rank has all of a DTensor, rather than a part or a term of it."""
    return all(placement.is_replicate() for placement in tensor.placements)


def relay_dtensor(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Replace the local part and the placements of `tensor` in place, so that optimizers that hold it keep working."""
    tensor._local_tensor = local
    tensor._spec = spec


@cache
def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an op writes to."""
    arguments = enumerate(op._schema.arguments)
    return tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and its place in a rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
