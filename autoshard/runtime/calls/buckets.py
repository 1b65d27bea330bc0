"""Pad the inputs of a call to few sizes, so that few programs serve calls of many."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import Call, format_leaf
from autoshard.config.constraints import names_like
from autoshard.config.options import Bucket
from passes.errors import InputError


def check_buckets(buckets: Mapping[str, Bucket], model: nn.Module) -> None:
    """Raise InputError for a path or glob that fits no argument of the model's forward; one of `**kwargs` has any name."""
    parameters = inspect.signature(model.forward).parameters if buckets else {}
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for pattern in buckets:
        start = re.split(r"[*?\[.]", pattern)[0]
        is_glob = pattern[len(start) : len(start) + 1] in ("*", "?", "[")
        if not any(name.startswith(start) if is_glob else name == start for name in parameters):
            raise InputError(
                f"Options(buckets=...): {pattern!r} matches no argument of {type(model).__name__}.forward; "
                f"{names_like(start, tuple(parameters))}"
            )


def padded(call: Call, buckets: Mapping[str, Bucket]) -> Call:
    """Return the call with its tensors padded as `buckets` says, by path or glob; the last that matches counts.

    DTensors are not padded, nor is what is larger than all sizes. Raises InputError for a tensor without the dim,
    and for one of integers that cannot hold the fill.
    """
    found: dict[str, Any] = {}
    for path, leaf in call.leaves.items() if buckets else ():
        bucket = next((one for glob, one in reversed(tuple(buckets.items())) if fnmatch.fnmatchcase(path, glob)), None)
        if bucket is not None and isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            found[path] = _padded(path, leaf, bucket)
    return replace(call, leaves=call.leaves | found) if found else call


def _padded(path: str, tensor: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    if not -tensor.dim() <= bucket.dim < tensor.dim():
        raise InputError(
            f"Options(buckets=...) pads dim {bucket.dim} of {path}, which is {format_leaf(tensor)}; give one of its dims"
        )
    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        limits = torch.iinfo(tensor.dtype)
        if not limits.min <= bucket.fill <= limits.max or bucket.fill != int(bucket.fill):  # NaN is not within them
            raise InputError(
                f"Options(buckets=...) fills {path} with {bucket.fill}, which {format_leaf(tensor)} cannot hold; give a whole "
                f"number from {limits.min} to {limits.max}"
            )
    dim = bucket.dim % tensor.dim()
    size = next((size for size in sorted(bucket.sizes) if size >= tensor.shape[dim]), tensor.shape[dim])
    missing = size - tensor.shape[dim]
    behind = [0, 0] * (tensor.dim() - 1 - dim)  # F.pad takes pairs from the last dim on
    return F.pad(tensor, [*behind, 0, missing], value=bucket.fill) if missing else tensor
