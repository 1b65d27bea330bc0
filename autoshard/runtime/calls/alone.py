"""Refuse calls of a submodule outside of its sharded model: its parameters are parts, which plain tensors do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from passes._torch import flatten_pytree
from passes.errors import UserError


@dataclass(frozen=True)
class Alone:
    """A forward pre-hook of the submodule `name`, which no program runs."""

    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [leaf for _, leaf in flatten_pytree((args, kwargs))[0]]
        if any(isinstance(leaf, DTensor) for leaf in leaves) or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return
        raise UserError(
            f"{self.name} ({type(module).__name__}) was called outside of the sharded model's forward, where it has a part of "
            "each parameter only; call the sharded model, also where a function such as merge_and_unload() returned this part of "
            "it, or let forward call the part, chosen by an argument (model(x, only='encode')): each value of an argument gets a "
            "program of its own; to generate() with an encoder-decoder model, load the full state dict into a plain one"
        )


def refuse_alone(model: nn.Module) -> None:
    """Let every submodule with parameters refuse plain tensors, once."""
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        if module is not model and any(True for _ in module.parameters()) and not any(map(_is_ours, hooks)):
            module.register_forward_pre_hook(Alone(name), with_kwargs=True)


def allow_alone(model: nn.Module) -> None:
    """Remove the hooks of `refuse_alone`, from a copy that is captured."""
    for module in model.modules():
        for number in [number for number, hook in module._forward_pre_hooks.items() if _is_ours(hook)]:
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _is_ours(hook: object) -> bool:
    return isinstance(hook, Alone)
