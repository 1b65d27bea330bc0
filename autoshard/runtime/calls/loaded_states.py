"""Cut the states that an optimizer loads as whole tensors to this rank's parts, as `load_state_dict` of a model does."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.runtime.parameters import part_like

_COUNT = "step"  # a number that optimizers keep plain


@cache
def take_loaded_states() -> None:
    """Let optimizers of sharded models step with states that were loaded as whole, plain tensors."""
    register_optimizer_step_pre_hook(_take_parts)


def _take_parts(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Cut the states of DTensors that are plain tensors of their shape, without communication: ranks loaded the same."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
            if is_whole and name != _COUNT:
                state[name] = part_like(value, parameter)
