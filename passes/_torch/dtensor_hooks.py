"""Replace methods of DTensor for checkpoints, and correct its views, data and random numbers, once a module is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard

from passes._torch.dtensor import Box, local_of_dtensor, relay_dtensor
from passes._torch.fake import is_fake, shares_memory
from passes._torch.patches import once
from passes._torch.pytree import map_pytree


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


def refuse_wrong_views() -> None:
    """Let a view of a DTensor raise where torch would silently mix up its elements.

    This is so where dims are flattened of which any but the first is sharded by a `_StridedShard`, as two mesh axes make it that
    shard one dim: torch keeps the number of blocks, though the dims before it multiply that.
    """
    once("DTensor's views", _check_views)


def _check_views() -> None:
    module: Any = _view_ops
    propagate = module.propagate_shape_and_sharding

    def checked(placements: Sequence[Placement], shape: Sequence[int], rule: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inner = set(_flattened_into_others(rule, shape))
        wrong = [one for one in placements if isinstance(one, _StridedShard) and one.dim in inner]
        if wrong:
            raise RuntimeError(
                f"torch would mix up the elements of this DTensor: dim {wrong[0].dim} of {tuple(shape)}, which several mesh axes "
                "shard, is flattened into others. Flatten the part, tensor.to_local(), or the whole, tensor.full_tensor()"
            )
        return propagate(placements, shape, rule, *args, **kwargs)

    module.propagate_shape_and_sharding = checked


def _flattened_into_others(rule: Iterable[Any], shape: Sequence[int]) -> Iterator[int]:
    """Yield the dims that are flattened with others before them."""
    for one in rule:
        if isinstance(one, _view_ops.Flatten):
            dims = [part.input_dim for part in one.input_dims if isinstance(part, _view_ops.InputDim)]
            yield from [dim for dim in dims if shape[dim] > 1][1:]
        yield from _flattened_into_others(one.inputs(), shape)


def write_to_parts(part_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let a change in place of a part of a DTensor, `weight[0].zero_()`, change the DTensor.

    A view that crosses ranks' parts is a gathered copy, and torch changes that alone, without an error. `part_like` cuts a whole
    tensor as a DTensor is. All ranks make the change together, as they make the view.
    """
    once("DTensor's views that are copies", lambda: _write_through(part_like))


def _write_through(part_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    name = "_dispatch_fast_path_python_tail"
    dispatched: Any = getattr(OpDispatcher, name)

    def written(self: OpDispatcher, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *rest: Any) -> Any:
        result = dispatched(self, op, args, kwargs, *rest)
        for tensor in _changed(op, args, kwargs):
            if _is_copied_view(tensor):
                _write_back(tensor, part_like)
        return result

    setattr(OpDispatcher, name, written)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten.fill_.Tensor, _fill)


def _fill(op: Any, args: tuple[DTensor, torch.Tensor], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Fill with a tensor of one number, as `weight[0] = 0` does, for which DTensor has no rule."""
    tensor, value = args
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.fill_(whole.item())


def _changed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an op writes to."""
    for position, name in _written_arguments(op):
        given = args[position] if position < len(args) else kwargs.get(name)
        yield from given if isinstance(given, (list, tuple)) else [given]


@cache
def _written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(op._schema.arguments)
    return tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _is_copied_view(tensor: Any) -> bool:
    if not (isinstance(tensor, DTensor) and tensor._is_view()):
        return False
    base = tensor._base
    return isinstance(base, DTensor) and not shares_memory(local_of_dtensor(tensor), local_of_dtensor(base))


def _write_back(view: DTensor, part_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    base: Any = view._base
    with torch.no_grad():
        whole = base.full_tensor().clone()
        whole_view: torch.Tensor = view._view_func_unsafe(whole)  # the same view of another tensor
        whole_view.copy_(view.full_tensor())
        local_of_dtensor(base).copy_(local_of_dtensor(part_like(whole, base)))


def read_numbers(whole_of: Callable[[DTensor], torch.Tensor]) -> None:
    """Let `item()`, and with it `bool()` and `float()`, of a DTensor read what `whole_of` returns.

    torch reads this rank's part: `p.grad.norm().item()` is the norm of a part, and with `if p.grad.isnan().any()` ranks take
    different branches, without an error.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    read = torch.compiler.disable(lambda op, args, kwargs: op(whole_of(args[0])))  # type: ignore[no-untyped-call]
    handlers[torch.ops.aten._local_scalar_dense.default] = read  # also where a function that is compiled calls item()


def assign_data(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `parameter.data = tensor` change a DTensor, which torch silently leaves as it was.

    torch changes the tensor that a DTensor shows, not the part that it holds. `laid_out_as` cuts a whole tensor as a DTensor is.
    The new part is held, not copied into the old one, which `parameter.data` may have been kept of.
    """
    once("DTensor's data", lambda: _hold_assigned_data(laid_out_as))


def _hold_assigned_data(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    shown: Any = DTensor.data

    def assign(self: DTensor, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"the .data of a DTensor of shape {tuple(self.shape)} takes a tensor of that shape, but this one is "
                f"{tuple(value.shape)}; give the whole tensor or a DTensor, or replace the parameter by a new nn.Parameter"
            )
        given = laid_out_as(value, self)
        shown.__set__(self, given)
        relay_dtensor(self, local_of_dtensor(given), given._spec)

    DTensor.data = property(shown.__get__, assign)  # type: ignore[assignment]


def draw_whole(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `normal_()`, `randn_like` and the other random ops of a DTensor on CPU draw one device's numbers.

    On CPU, torch draws each rank's part from the same state, so that all parts have the same numbers, and leaves out a generator
    that it is given. Here, each rank draws the whole and keeps its part, which `laid_out_as` cuts.
    """
    once("DTensor's random ops", lambda: _draw_whole(laid_out_as))


def _draw_whole(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    name = "_dispatch_get_local_results_slow_path"
    of_part: Any = getattr(OpDispatcher, name)

    def drawn(self: OpDispatcher, op: Any, args: tuple[Any, ...], info: Any) -> Any:
        if op not in self._random_ops or not _has_parts_on_cpu(args[0]):
            return of_part(self, op, args, info)
        tensor, local = args[0], local_of_dtensor(args[0])
        is_read = not (_written_arguments(op) or op in _LIKE)
        whole = tensor.full_tensor() if is_read else torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        results = op(whole, *args[1:], **info.local_kwargs)
        parts = map_pytree(lambda one: local_of_dtensor(laid_out_as(one, tensor)), results)
        return local.copy_(parts) if _written_arguments(op) else parts

    setattr(OpDispatcher, name, torch.compiler.disable(drawn))  # type: ignore[no-untyped-call]


_LIKE = {
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
}  # random ops that read a tensor's shape only


def _has_parts_on_cpu(tensor: object) -> bool:
    """Return whether it is a DTensor on CPU whose parts have values, unlike those that a function is compiled with."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.device_type != "cpu" or is_fake(local_of_dtensor(tensor)):
        return False
    return not any(placement.is_partial() for placement in tensor.placements)
