"""Let `reset_parameters` draw one device's values: it sees whole tensors, of which each rank then keeps its part."""

from __future__ import annotations

from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.parameters import part_like
from passes._torch import local_of_dtensor


@runtime_checkable
class Resets(Protocol):
    """A module that draws its parameters anew."""

    def reset_parameters(self) -> Any: ...


def draw_whole(model: nn.Module) -> None:
    """Let `reset_parameters` of every submodule draw the values of one device, if ranks have the same seed; once."""
    for module in model.modules():
        if isinstance(module, Resets) and "reset_parameters" not in vars(module):
            vars(module)["reset_parameters"] = MethodType(_reset, module)


def _reset(module: nn.Module) -> Any:
    parts: list[tuple[dict[str, Any], str, DTensor, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if isinstance(parameter, DTensor):
                whole = made.setdefault(id(parameter), _whole(parameter))
                parts.append((child._parameters, name, parameter, whole))
    for held, name, _, whole in parts:
        held[name] = whole
    try:
        assert isinstance(module, Resets)
        result = type(module).reset_parameters(module)
    finally:
        for held, name, part, _ in parts:
            held[name] = part
    with torch.no_grad():
        for _, _, part, whole in parts:
            part.copy_(part_like(whole, part))
    return result


def _whole(parameter: DTensor) -> nn.Parameter:
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local_of_dtensor(parameter).device)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
