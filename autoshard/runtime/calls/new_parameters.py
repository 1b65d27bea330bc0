"""Take over parameters that were put into a sharded model: a replaced head, an adapter."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.runtime.calls.alone import refuse_alone
from autoshard.runtime.calls.drawing import draw_whole
from autoshard.runtime.parameters import Place, distributed_parameter
from passes.errors import UserError
from passes.ir.layout import replicated

_left: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # parameters as they were before they were taken over, by id


def take_over(model: nn.Module, place: Place) -> dict[str, nn.Parameter]:
    """Replace plain parameters of a sharded model by DTensors that are whole on every rank; return these by name.

    An optimizer that holds one of the plain parameters would train it in vain: its next step is an error. Raises
    UserError for a plain tensor in the place of a parameter.
    """
    made: dict[int, nn.Parameter] = {}
    found: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if isinstance(parameter, DTensor):
                _check_mesh(fqn, parameter, place)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if not isinstance(parameter, nn.Parameter):
                raise UserError(
                    f"parameter {fqn!r} was replaced by a plain tensor; give a DTensor that is laid out as the parameter, "
                    "such as one made from model.named_parameters(), or an nn.Parameter, which is taken over"
                )
            if id(parameter) not in made:
                made[id(parameter)] = distributed_parameter(parameter, place, replicated(place.mesh))
                _leave(parameter, fqn)
            module._parameters[name] = found[fqn] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                raise UserError(
                    f"buffer {f'{prefix}.{name}' if prefix else name!r} is a DTensor, such as torch.nn.utils.prune makes of a "
                    "parameter; buffers are whole on every rank: give .full_tensor(), or prune before autoshard(...)"
                )
            if buffer is not None and not buffer.is_meta and buffer.device != place.device:
                module._buffers[name] = buffer.to(place.device)
    if found:
        refuse_alone(model)
        draw_whole(model)
    return found


def _check_mesh(fqn: str, parameter: DTensor, place: Place) -> None:
    if parameter.device_mesh != place.device_mesh:
        raise UserError(
            f"parameter {fqn!r} is distributed once more, as by fully_shard or parallelize_module, and the model is sharded "
            f"over {place.mesh} already; leave the former out"
        )


def _leave(parameter: nn.Parameter, fqn: str) -> None:
    if not _left:
        register_optimizer_step_pre_hook(_check_optimizer)
    _left[id(parameter)] = weakref.ref(parameter), fqn


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise UserError for an optimizer that holds a parameter that a model no longer has."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference, fqn = _left.get(id(parameter), (None, ""))
            if reference is not None and reference() is parameter:
                raise UserError(
                    f"the optimizer holds parameter {fqn!r} as it was before the sharded model took it over, so that it "
                    "would never be trained; call the model once after replacing a parameter, then build the optimizer"
                )
