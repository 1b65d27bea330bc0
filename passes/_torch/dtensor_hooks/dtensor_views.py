"""Refuse views of DTensors that torch gets wrong, and write back what is changed in a view that is a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard

from passes._torch.dtensor import local_of_dtensor, written_arguments
from passes._torch.dtensor_hooks.pending_parts import fill_pending, is_pending
from passes._torch.fake import shares_memory
from passes._torch.patches import once


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

    def written(
        self: OpDispatcher, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Any, sharding: Any, *rest: Any
    ) -> Any:
        gathered = args[0] if _is_written_in_a_copy(op, args, sharding) else None
        spec = None if gathered is None else gathered._spec
        if op is torch.ops.aten.fill_.Scalar and is_pending(args[0]):
            result: Any = fill_pending(*args)
        else:
            result = dispatched(self, op, args, kwargs, mesh, sharding, *rest)
        if gathered is not None:
            gathered._spec = spec  # as torch gives it that of the copy
            raise RuntimeError(
                f"{op} needs the elements of several ranks of this DTensor, and torch would change a gathered copy alone; change "
                "the whole, tensor.full_tensor(), and give it back: parameter.data = whole"
            )
        for tensor in _changed(op, args, kwargs):
            if _is_copied_view(tensor):
                _write_back(tensor, part_like)
        return result

    setattr(OpDispatcher, name, written)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten.fill_.Tensor, _fill)
    handlers[torch.ops.aten.eye.m_out] = partial(_eye, part_like)


def _fill(op: Any, args: tuple[DTensor, torch.Tensor], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Fill with a tensor of one number, as `weight[0] = 0` does, for which DTensor has no rule."""
    tensor, value = args
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.fill_(whole.item())


def _eye(
    part_like: Callable[[torch.Tensor, DTensor], DTensor], op: Any, args: tuple[int, int], kwargs: Mapping[str, Any]
) -> DTensor:
    """Write a part of the identity, as `nn.init.eye_` does, of which torch writes one into each part."""
    out: DTensor = kwargs["out"]
    local = local_of_dtensor(out)
    whole = torch.eye(*args, dtype=local.dtype, device=local.device)
    local.copy_(local_of_dtensor(part_like(whole, out)))
    return out


def _is_written_in_a_copy(op: Any, args: Sequence[Any], sharding: Any) -> bool:
    """Return whether an op writes to its first argument in another layout than its own, as `index_add_` on a sharded dim."""
    if not (args and isinstance(args[0], DTensor) and sharding.needs_redistribute) or (0, "self") not in written_arguments(op):
        return False
    needed = sharding.redistribute_schema.args_schema[0]
    return bool(needed.placements != args[0].placements)


def _changed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an op writes to."""
    for position, name in written_arguments(op):
        given = args[position] if position < len(args) else kwargs.get(name)
        yield from given if isinstance(given, (list, tuple)) else [given]


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
