"""Convolve DTensors as one device does: by parts of the batch, with whole weights.

torch convolves each part of a sharded weight, and of channels, height or width, as if it were the whole. It gives a transposed
convolution the shape of another, and adds up the gradients of a weight once per rank where the input is not sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from passes._torch.dtensor import dtensor_of_local, dtensor_spec, local_of_dtensor, shard_of
from passes._torch.dtensor_hooks.empty_parts import as_usual

aten = torch.ops.aten


def _convolved(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    image, weight, bias, *settings = args
    if not _are_dtensors(image, weight, bias):
        return as_usual(op, args, kwargs)  # which raises
    by_batch = _by_batch(image)
    local = op(_laid_out(image, by_batch), _whole(weight), _whole(bias), *settings, **kwargs)
    return _made(image, by_batch, local, (image.shape[0], *local.shape[1:]))


def _convolved_backward(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    gradient, image, weight, *settings = args
    if not _are_dtensors(gradient, image, weight):
        return as_usual(op, args, kwargs)  # which raises
    by_batch = _by_batch(image)
    of_weight = [placement if placement.is_replicate() else Partial() for placement in by_batch]
    results = op(_laid_out(gradient, by_batch), _laid_out(image, by_batch), _whole(weight), *settings, **kwargs)
    of_image, *of_parameters = results
    return (
        None if of_image is None else _made(image, by_batch, of_image, image.shape),
        *(None if one is None else _made(image, of_weight, one, one.shape) for one in of_parameters),
    )


def _are_dtensors(*tensors: Any) -> bool:
    return all(one is None or isinstance(one, DTensor) for one in tensors)


def _by_batch(image: DTensor) -> list[Placement]:
    return [one if shard_of(one) == (0, 1) else Replicate() for one in image.placements]


def _laid_out(tensor: DTensor, placements: list[Placement]) -> torch.Tensor:
    return local_of_dtensor(tensor.redistribute(placements=placements))


def _whole(tensor: DTensor | None) -> torch.Tensor | None:
    return None if tensor is None else _laid_out(tensor, [Replicate()] * tensor.device_mesh.ndim)


def _made(image: DTensor, placements: list[Placement], local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    return dtensor_of_local(local, dtensor_spec(image.device_mesh, tuple(placements), tuple(shape), local.dtype))


CONVOLUTIONS = {aten.convolution.default: _convolved, aten.convolution_backward.default: _convolved_backward}
