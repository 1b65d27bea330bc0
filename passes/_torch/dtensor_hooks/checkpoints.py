"""Replace methods of DTensor for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from passes._torch.dtensor import Box
from passes._torch.patches import once


def teach_checkpoints(boxes_of: Callable[[DTensor], Sequence[Box] | None]) -> None:
    """Let `torch.distributed.checkpoint` save and load DTensors whose local part is several boxes.

    torch takes every local part for one box, and would write one of several blocks (a sharded fused projection, say) to
    wrong places without an error. No hook reaches the state of an optimizer, so the methods of DTensor are replaced,
    once a module is sharded. Tensors for which `boxes_of` returns None are saved and loaded by torch's own methods.
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
