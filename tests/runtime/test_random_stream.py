"""Random numbers of a sharded model's calls: of their own, but in a call that a checkpoint makes again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autoshard import Options, ShardedModule, autoshard
from autoshard.runtime.calls.random_stream import RandomStream

EAGER = Options(recipe="fsdp", compile="eager")
X = torch.ones(8, 6)


class Dropped(nn.Module):
    """Drop half of a bias: its gradient is the output's sum over the batch."""

    def __init__(self, bias: float = 1.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((6,), bias))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.bias, 0.5)


def sharded(mesh: DeviceMesh, bias: float = 1.0) -> ShardedModule:
    return autoshard(Dropped(bias), mesh, (X,), options=EAGER)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_same_numbers_again(one_rank: DeviceMesh, *, reentrant: bool) -> None:
    model, x = sharded(one_rank), X.clone().requires_grad_()
    outputs = [checkpoint(model, x, use_reentrant=reentrant) for _ in range(3)]
    assert not torch.equal(outputs[0], outputs[1])
    for output in reversed(outputs):
        model.zero_grad()
        output.sum().backward()
        assert isinstance(model.bias, DTensor) and isinstance(model.bias.grad, DTensor)
        assert torch.equal(model.bias.grad.full_tensor(), output.sum(0))


def test_models_of_one_seed_draw_different_numbers(one_rank: DeviceMesh) -> None:
    torch.manual_seed(0)
    models = [sharded(one_rank, bias) for bias in (1.0, 2.0)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    outputs = [model(X) / model.bias.full_tensor()[0] for model in models]
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_sharding_and_calls_that_are_not_random_leave_torchs_generator_as_it_is(one_rank: DeviceMesh) -> None:
    torch.manual_seed(0)
    before, model = torch.get_rng_state(), autoshard(nn.Linear(6, 6), one_rank, (X,), options=EAGER)
    torch.manual_seed(0)
    autoshard(nn.Identity(), one_rank, (X,), options=EAGER)
    model(X).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_last_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.runtime.calls.random_stream.KEPT", 2)
    stream = RandomStream((3,))
    seeds = {int(stream.seed(call, torch.device("cpu"))) for call in range(5)}
    assert len(seeds) == 5 and list(stream.calls.values()) == [3, 4]
