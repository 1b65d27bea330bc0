"""Plans that the tests of the report share; each is made once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, plan
from examples.llama import TINY, Llama, step_of
from tests.models import build


class Block(nn.Module):
    """A residual block whose second linear gives what the first one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Deep(nn.Module):
    """32 equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Frozen(nn.Module):
    """Has a parameter that is not trained, and one of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.scale = nn.Linear(64, 64), nn.Parameter(torch.zeros(64, dtype=torch.complex64))
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.trunk(x) * self.scale).abs()


@cache
def deep() -> ShardingPlan:
    with torch.device("meta"):
        model, x = Deep(), torch.empty(8, 4, 16)
    return plan(model, Mesh("dp=2,tp=2", hardware="h100"), (x,), options=Options(recipe="fsdp+megatron"))


@cache
def tiny_llama() -> ShardingPlan:
    with torch.device("meta"):
        model, args = step_of(TINY, batch=8, seq=32)
    assert isinstance(model, Llama)
    return plan(model, Mesh("dp=2,tp=2", hardware="h100"), args, options=Options(recipe="fsdp+megatron"))


@cache
def searched() -> ShardingPlan:
    """Return a plan that was searched for, with its candidates."""
    case = build("mlp", dtype=torch.float32)
    return plan(case.model, Mesh("dp=2,tp=2", hardware="h100"), case.args, case.kwargs)


@cache
def unknown_hardware() -> ShardingPlan:
    """Return a plan without a step."""
    case = build("mlp", dtype=torch.float32)
    return plan(case.model, Mesh("dp=2,tp=2"), case.args, case.kwargs, options=Options(recipe="ddp", hardware=None))


def frozen(*, trained: bool) -> ShardingPlan:
    """Return a plan without a step, of a model whose parameters are not trained, or all but one."""
    with torch.device("meta"):
        model, x = Frozen(), torch.empty(4, 64)
        model.scale.requires_grad_(trained)
    return plan(model, Mesh("dp=2"), (x,), options=Options(recipe="fsdp", hardware=None))


@cache
def followed() -> ShardingPlan:
    """Return a plan as a run that follows one has it: with the step that was predicted, and collectives of its own program."""
    made = tiny_llama()
    own = (replace(one, id=f"{one.id}_of_run", seconds=None, exposed=None) for one in made.collectives)
    return replace(made, collectives=tuple(own))
