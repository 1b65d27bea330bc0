"""Sharding rules of image pooling and resampling: batch and channels may be sharded, positions stay whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from passes.ir.call import Call, Tensor
from passes.rules.factors import Dim, Factors
from passes.rules.rule import Linear, LocalCall, Space, register, register_named

aten = torch.ops.aten


def _per_channel(positions: int, *, linear: bool) -> Callable[[Call], Space | None]:
    """Return the space of an op that treats each image and channel separately, on its last `positions` dims.

    `linear` says whether the op is linear in its first operand.
    """

    def space(call: Call) -> Space | None:
        tensors = (*call.operands, *call.results)
        if any(tensor.ndim != tensors[0].ndim for tensor in tensors):
            return None
        factors = Factors()
        dims = [_dims(factors, tensor.shape, positions, f"t{i}_") for i, tensor in enumerate(tensors)]
        split = len(call.operands)
        return factors.space(dims[:split], dims[split:], linear=(Linear((0,)),) if linear else ())

    return space


def _dims(factors: Factors, shape: Sequence[int], positions: int, prefix: str) -> list[Dim]:
    first = len(shape) - positions
    carried = factors.dims(shape[:first], prefix="c")
    return carried + factors.dims(shape[first:], blocked=range(positions), prefix=prefix)


def _padded_dims(call: Call) -> int:
    return len(call.arg("padding")) // 2


def _sampler(call: Call) -> Space:
    """Return the space of values picked from each image by a grid of positions, the same for all its channels."""
    value, positions = call.operands
    factors, image, grid, picked = _sampled(value, positions, call.result)
    return factors.space([image, grid], [picked], linear=(Linear((0,)),))


def _sampler_backward(call: Call) -> Space:
    """Return the space of the gradients of `_sampler`; the grid's is a sum over channels, and is given asked for or not.
    """
    grad, value, positions = call.operands
    factors, image, grid, picked = _sampled(value, positions, grad)
    results = [image, grid] if call.arg("output_mask")[0] else [grid]
    return factors.space([picked, image, grid], results, linear=(Linear((0,)),))


def _sampled(value: Tensor, grid: Tensor, picked: Tensor) -> tuple[Factors, list[Dim], list[Dim], list[Dim]]:
    factors = Factors()
    batch, channels = factors.dims(value.shape[:2], prefix="c")
    first = {"image": ([batch, channels], value.shape[2:]), "grid": ([batch], grid.shape[1:])}
    first["picked"] = ([batch, channels], picked.shape[2:])
    image, places, found = (
        [*carried, *factors.dims(rest, blocked=range(len(rest)), prefix=name)] for name, (carried, rest) in first.items()
    )
    return factors, image, places, found


def _resize_backward_local(call: LocalCall) -> Node:
    """Pass the input size of this rank's part, which is an argument of the op."""
    place = [parameter.name for parameter in call.call.op._schema.arguments].index("input_size")
    sizes = list(call.local_shape())
    return call.emit(call.call.op, *call.args[:place], sizes, *call.args[place + 1 :], **call.kwargs)


register(aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default, space=_per_channel(2, linear=False))
register_named(  # Inductor's max pooling, which keeps an int8 offset per window, and its conversion to indices
    "prims._low_memory_max_pool_with_offsets.default",
    "prims._low_memory_max_pool_offsets_to_indices.default",
    space=_per_channel(2, linear=False),
)
register(
    aten.max_pool2d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bilinear2d_aa.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.default,
    aten.upsample_bicubic2d.vec,
    space=_per_channel(2, linear=True),
)
register(
    aten.max_pool3d_with_indices.default,
    space=_per_channel(3, linear=False),
)
register(
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.upsample_nearest3d.default,
    aten.upsample_trilinear3d.default,
    space=_per_channel(3, linear=True),
)
register(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    space=lambda call: _per_channel(_padded_dims(call), linear=True)(call),
)
register(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, space=_sampler_backward)
register(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, space=_sampler)
register(aten.upsample_nearest1d.default, aten.upsample_linear1d.default, space=_per_channel(1, linear=True))
register(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_linear1d_backward.default,
    space=_per_channel(1, linear=True),
    local=_resize_backward_local,
)
register(
    aten._upsample_bicubic2d_aa_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    space=_per_channel(2, linear=True),
    local=_resize_backward_local,
)
register(
    aten.upsample_nearest3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    space=_per_channel(3, linear=True),
    local=_resize_backward_local,
)
