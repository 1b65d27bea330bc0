"""The time of planning grows with the calls of a model, not with the paths through them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, plan

TIMES = 40  # each value is read twice, so there are 2**40 paths


class _Twice(nn.Module):
    """A chain of calls of which each reads the result before it twice, in a value of each sort that a walk may follow."""

    def __init__(self, chain: str) -> None:
        super().__init__()
        self.chain = chain
        self.up, self.down = nn.Linear(16, 30, bias=False), nn.Linear(30, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(30, device=x.device).float()
        rows = torch.arange(x.shape[0], device=x.device).float()
        y = self.down(self.up(x) * (_curved(places) if self.chain == "columns" else places))
        if self.chain == "sums":
            for _ in range(TIMES):
                y = y * 2.0 + y * -0.5
        return (y * (_curved(rows) if self.chain == "rows" else rows)[:, None]).square().mean()


def _curved(x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = torch.sin(x) * 0.5 + torch.cos(x)
    return x


@pytest.mark.slow
@pytest.mark.parametrize(("chain", "recipe", "mesh"), [
    ("sums", "megatron", "tp=4"), ("rows", "fsdp", "dp=4"), ("columns", "megatron", "tp=4"),
])  # fmt: skip
def test_values_that_are_read_twice_are_followed_once(chain: str, recipe: str, mesh: str) -> None:
    found = plan(_Twice(chain), Mesh(mesh, hardware="h100"), (torch.randn(7, 16),), options=Options(recipe=recipe))
    assert found.cost is not None
