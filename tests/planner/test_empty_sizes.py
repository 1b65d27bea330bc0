"""Plans of calls with empty tensors, such as an empty batch: every recipe and the search plan them, and no candidate fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, plan
from passes.errors import RecipeError


class Attends(nn.Module):
    """Has an embedding, attention and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        return self.out(h + self.attention(h, h, h)[0]).square().mean()


class HoldsNothing(nn.Module):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nothing = nn.Linear(8, 8), nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() + (self.layer(x) @ self.nothing.t()).sum()


class Compares(nn.Module):
    """Has a loss that is a mean over elements."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x), x)


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.binary_cross_entropy, F.poisson_nll_loss, F.cross_entropy)

CALLS = {
    "an empty batch": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.zeros(0, 8)),
    "an empty batch of tokens": (Attends, torch.zeros(0, 4, dtype=torch.int64)),
    "no positions": (Attends, torch.zeros(4, 0, dtype=torch.int64)),
    "an empty parameter": (HoldsNothing, torch.zeros(4, 8)),
}


@pytest.mark.filterwarnings("error:the candidate plan")
@pytest.mark.parametrize("recipe", ["auto", "fsdp", "fsdp+megatron"])
@pytest.mark.parametrize("name", CALLS)
def test_empty_tensors_are_planned(name: str, recipe: str) -> None:
    build, x = CALLS[name]
    made = plan(build(), Mesh("dp=2,tp=2", hardware="h100"), (x,), options=Options(recipe=recipe))
    assert "dp=2" in str(made)
    assert made.search is None or not [one.note for one in made.search.candidates if "failed" in one.note]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_the_loss_of_an_empty_batch_is_planned(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    made = plan(Compares(loss), Mesh("dp=2", hardware="h100"), (torch.zeros(0, 8),), options=Options(recipe="fsdp"))
    assert made.parameters["layer.weight"].shape == (8, 8)


def test_a_sequence_without_positions_is_not_sharded() -> None:
    with pytest.raises(RecipeError, match="context"):
        plan(Attends(), Mesh("cp=2"), (torch.zeros(4, 0, dtype=torch.int64),), options=Options(recipe="context"))
