"""A parameter that the loss does not reach has no gradient, as on one device: an optimizer would decay it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import Options, autoshard
from autoshard.runtime.reached_gradients import outputs_of_gradients
from passes.ir.text import parse_graph

X = torch.arange(48.0).reshape(8, 6) / 48


class TwoTasks(nn.Module):
    """Two heads on one trunk, and a loss of each; forward(x [batch, 6])."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        return self.one(hidden).square().mean(), self.other(hidden).square().mean()


@pytest.mark.parametrize("recipe", ["fsdp", "ddp"])
def test_two_losses_in_turns_train_as_on_one_device(one_rank: DeviceMesh, recipe: str) -> None:
    torch.manual_seed(0)
    plain = TwoTasks()
    model = autoshard(plain, one_rank, (X,), options=Options(recipe=recipe, compile="eager"))
    for trained in (plain, model):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            trained(X)[step % 2].backward()
            optimizer.step()
        assert trained.one.weight.grad is None and trained.other.weight.grad is not None
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name))


def test_gradients_are_of_the_outputs_that_they_are_computed_from() -> None:
    gm, _ = parse_graph(
        """
mesh dp=2
stage CAPTURED
%w: f32[4] = parameter("w")
%b: f32[4] = parameter("b")
%c: f32[4] = parameter("c")
%left: f32[4] = tangent("left")
%right: f32[4] = tangent("right")
%out: f32[4] = mul.Tensor(%w, %b)
%other: f32[4] = mul.Tensor(%w, %c)
%grad_b: f32[4] = mul.Tensor(%left, %w)
%grad_c: f32[4] = mul.Tensor(%right, %w)
%by_b: f32[4] = mul.Tensor(%left, %b)
%by_c: f32[4] = mul.Tensor(%right, %c)
%grad_w: f32[4] = add.Tensor(%by_b, %by_c)
return output("left") %out, output("right") %other, gradient("w") %grad_w, gradient("b") %grad_b, gradient("c") %grad_c
"""
    )
    assert outputs_of_gradients(gm) == {"w": {"left", "right"}, "b": {"left"}, "c": {"right"}}
