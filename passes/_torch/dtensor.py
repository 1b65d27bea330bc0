"""DTensor: placements, specs, tensors made without checks, and checkpoints of parts that are several boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as DPlacement
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from passes._torch.patches import once


def strided_shard(dim: int, factor: int) -> DPlacement:
    """DTensor's shard of a digit: each of `factor` blocks of the dim is sharded by itself."""
    return _StridedShard(dim, split_factor=factor)


def shard_of(placement: DPlacement) -> tuple[int, int] | None:
    """Dim and number of blocks of a shard, 1 block for a contiguous one; None for what is no shard."""
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, DShard) else None


def dtensor_spec(
    device_mesh: DeviceMesh, placements: tuple[DPlacement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Where a contiguous tensor of global `shape` lives."""
    stride = torch.empty(shape, device="meta").stride()
    # A shard of blocks can also say that another axis comes first; DTensor must be told where it does not.
    is_order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, device_mesh) is not None
    return DTensorSpec(
        device_mesh,
        placements,
        TensorMeta(torch.Size(shape), stride, dtype),
        use_strided_shard_as_shard_order=None if is_order else False,
    )


def dtensor_of_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around this rank's part, without communication, checks or autograd."""
    # Without __init__, which does nothing and costs as much as the rest: once per gradient and step.
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def local_of_dtensor(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


def relay_dtensor(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give the same object another part and placements; optimizers that hold it keep working."""
    tensor._local_tensor = local
    tensor._spec = spec


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and where it stands in a rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


def teach_checkpoints(boxes_of: Callable[[DTensor], Sequence[Box] | None]) -> None:
    """Let `torch.distributed.checkpoint` save and load DTensors whose local part is several boxes.

    torch takes every local part for one box, and would write one of blocks (a sharded fused projection, say) to
    wrong places without a word. There is no hook that reaches the state of an optimizer, so DTensor's own are
    replaced, once a module is sharded; a tensor for which `boxes_of` gives None goes the way it always went.
    """
    once("DTensor's checkpoints", lambda: _put_in_hooks(boxes_of))


def _put_in_hooks(boxes_of: Callable[[DTensor], Sequence[Box] | None]) -> None:
    write_items: Any = DTensor.__create_write_items__
    chunk_list: Any = DTensor.__create_chunk_list__
    shard_at: Any = DTensor.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, object: Any) -> Any:
        boxes = boxes_of(self)
        if boxes is None:
            return write_items(self, fqn, object)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in boxes
        ]

    def create_chunk_list(self: DTensor) -> Any:
        boxes = boxes_of(self)
        return chunk_list(self) if boxes is None else [_chunk(box) for box in boxes]

    def get_tensor_shard(self: DTensor, index: Any) -> torch.Tensor:
        boxes = boxes_of(self)
        if boxes is None:
            whole: torch.Tensor = shard_at(self, index)
            return whole
        box = next(box for box in boxes if torch.Size(box.offsets) == index.offset)
        part = self.to_local()
        for dim, (start, length) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
