"""Dynamo's guards on the versions of dicts, and on tensors: thousands are checked in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import RootGuardManager, TensorGuards
from torch._dynamo.guards import GuardManagerType


def unchanged_since_now(dicts: Sequence[Mapping[Any, Any]]) -> Callable[[], bool]:
    """Return a function that says whether none of `dicts` was written to since now."""
    held = tuple(dicts)
    root = RootGuardManager()
    for number, one in enumerate(held):
        item = root.tuple_getitem_manager(number, "", one, GuardManagerType.GUARD_MANAGER)
        item.add_dict_version_guard(one, [""], None)

    def check() -> bool:
        return bool(root.check(held))

    return check


def alike_as_now(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that says whether all `tensors` are of the type, dtype and device that they are now, and require
    gradients as now.

    It says no in another mode, of autocast or inference, say: dispatch keys are compared.
    """
    held = tuple(tensors)
    sizes: Any = [[None] * tensor.ndim for tensor in held]  # any size, though torch's stub says a list of sizes
    guards = TensorGuards(*held, dynamic_dims_sizes=sizes, dynamic_dims_strides=sizes)

    def check() -> bool:
        return bool(guards.check(*held))

    return check
