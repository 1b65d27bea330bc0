"""Test programs that are made in a call while hooks for saved tensors are active, which `torch.func.grad` refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from autoshard import CaptureError, Mesh, Options, autoshard, plan
from autoshard.compile.compiled import Mode

X = torch.arange(8.0).view(2, 4) / 8
OPTIONS = Options(compile="eager", progress=False)


class Penalized(nn.Module):
    """Return a gradient that `torch.func` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = torch.func.grad(lambda h: h.pow(3).sum())(self.linear(x))
        return gradient


@pytest.mark.parametrize("active", [nullcontext, save_on_cpu])
def test_a_gradient_by_torch_func_in_a_program_that_a_call_makes(
    one_rank: DeviceMesh, active: Callable[[], AbstractContextManager[None]]
) -> None:
    model = Penalized()
    sharded = autoshard(model, one_rank, options=OPTIONS)
    with active():
        output = sharded(X)
    torch.testing.assert_close(output, model(X))
    output.sum().backward()
    model(X).sum().backward()
    for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_checkpoint_around_the_call_that_makes_a_program(one_rank: DeviceMesh, compiler: Mode) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    sharded = autoshard(model, one_rank, options=Options(compile=compiler, progress=False))
    checkpoint(sharded, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    model(X).sum().backward()
    for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_plan_that_is_made_while_hooks_are_active() -> None:
    with save_on_cpu():
        assert plan(Penalized(), Mesh("dp=2", hardware="h100"), (X,)).cost is not None


def test_hooks_are_those_of_the_caller_afterwards(one_rank: DeviceMesh) -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    sharded = autoshard(Penalized(), one_rank, options=OPTIONS)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        sharded(X)
        saved.clear()
        torch.ones(2, requires_grad=True).exp()
    assert len(saved) == 1


def test_a_call_that_cannot_be_captured_leaves_transforms_and_hooks_as_they_were(one_rank: DeviceMesh) -> None:
    class Broken(Penalized):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gradient: torch.Tensor = torch.func.grad(lambda h: h.sum() * h.sum().item())(self.linear(x))
            return gradient

    with pytest.raises(CaptureError, match=r"reads a number out of a tensor [^$]*test_saved_tensors_hooks"):
        autoshard(Broken(), one_rank, options=OPTIONS)(X)
    with pytest.raises(CaptureError, match="reads a number out of a tensor"):
        plan(Broken(), Mesh("dp=2", hardware="h100"), (X,))
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.exp())
