"""Copy the user's module onto tensors without data, so that tracing cannot change the original.

Tracing runs the user's Python: on the copy it cannot change the module's buffers or attributes, and it needs no memory
for tensors, whatever the size of the model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from autoshard.capture.capture_errors import DENSE_ONLY
from autoshard.capture.held_objects import held_tensors, reachable_tensors
from passes._torch import is_fake
from passes.errors import CaptureError, with_article
from passes.ir.graph import Input, InputRole


@dataclass(frozen=True)
class FakeModule:
    """The fake copy and the tensors it holds, in the order of `named_parameters` and `named_buffers`.

    `tensors` maps the role and name of each tensor to its fake: parameters, buffers, then tensors that are plain
    attributes; a tied tensor appears once, under its first name. `attributes` holds the original tensor of each plain
    attribute.
    """

    module: nn.Module
    tensors: dict[Input, torch.Tensor]
    tied: dict[str, str]
    attributes: dict[str, torch.Tensor]


def fake_module(module: nn.Module, mode: Any, device: torch.device, dtype: torch.dtype | None = None) -> FakeModule:
    """Copy `module` onto fake tensors on `device`; tied parameters stay tied.

    If `dtype` is given, floating-point parameters have that dtype.
    """
    memo: dict[int, Any] = {}
    tensors: dict[Input, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in memo:
            tied[fqn] = first_name[id(parameter)]
            continue
        _check_parameter(fqn, parameter)
        with mode:
            fake = nn.Parameter(_empty_like(parameter, device, dtype), requires_grad=parameter.requires_grad)
        memo[id(parameter)], first_name[id(parameter)] = fake, fqn
        tensors[Input(InputRole.PARAMETER, fqn)] = fake
    for fqn, buffer in module.named_buffers():
        _check_dense("buffer", fqn, buffer)
        tensors[Input(InputRole.BUFFER, fqn)] = memo[id(buffer)] = fake_tensor(buffer, mode, device)
    attributes: dict[str, torch.Tensor] = {}
    for fqn, tensor in held_tensors(module):
        if id(tensor) not in memo:
            _check_dense("attribute", fqn, tensor)
            tensors[Input(InputRole.BUFFER, fqn)] = memo[id(tensor)] = fake_tensor(tensor, mode, device)
            attributes[fqn] = tensor
    for tensor in reachable_tensors(module):
        memo.setdefault(id(tensor), tensor)  # one that is read is a constant: the model's own, not a copy of it
    return FakeModule(_copy(module, memo), tensors, tied, attributes)


def fake_tensor(
    tensor: torch.Tensor, mode: Any, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a contiguous fake leaf of the same shape, dtype and requires_grad; floating-point values get `dtype` if
    given.
    """
    with mode:
        return _empty_like(tensor, device, dtype).requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kept, device=device)


def check_parameters(module: nn.Module) -> None:
    """Raise CaptureError for a parameter without a shape, or no plain tensor, or named as the gradient of an input."""
    for fqn, parameter in module.named_parameters():
        _check_parameter(fqn, parameter)


def _check_parameter(fqn: str, parameter: nn.Parameter) -> None:
    if fqn.startswith("input:"):
        raise CaptureError(f"parameter {fqn} is named as plans name the gradient of an input; rename it, without 'input:'")
    if isinstance(parameter, UninitializedParameter):
        raise CaptureError(
            f"parameter {fqn} has no shape yet, as its module is lazy; run the module once on one device before"
        )
    if isinstance(parameter.data, DTensor):
        raise CaptureError(
            f"parameter {fqn} is a DTensor: the module is sharded already, as by autoshard, fully_shard or parallelize_module; "
            "give it as it is on one device, with plain tensors as parameters"
        )
    if type(parameter.data) is not torch.Tensor and not is_fake(parameter):
        raise CaptureError(
            f"parameter {fqn} is {with_article(type(parameter.data).__name__)}; give the module as it is on one device, "
            f"with plain tensors as parameters"
        )
    _check_dense("parameter", fqn, parameter)


def _check_dense(what: str, fqn: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{what} {fqn} is {tensor.layout}, {DENSE_ONLY}")


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied, and a copy without data is what is traced: {error}; "
            f"keep what cannot be copied (locks, files, process groups) out of the module's attributes"
        ) from error
