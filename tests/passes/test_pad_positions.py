"""Ops that read or give positions see those of the model, where the inner part of what they index is padded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Options, check

BATCH, SEQ, WIDTH = 6, 8, 7
FLAT = SEQ * WIDTH
EVERY_THIRD = torch.arange(0, FLAT, 3)

# Of a batch of rows with 8 x 7 elements each, whose 7 are padded to 9:
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "take": lambda x: torch.take(x, torch.arange(0, x.numel(), 5)),
    "index": lambda x: x[:, EVERY_THIRD],
    "index, from the end": lambda x: x[:, -EVERY_THIRD - 1],
    "index_select": lambda x: x.index_select(1, EVERY_THIRD),
    "index_put": lambda x: x.index_put((torch.tensor([1, 2]), torch.tensor([9, 20])), x.new_tensor(2.0)),
    "index_add": lambda x: x.index_add(1, EVERY_THIRD, x[:, : len(EVERY_THIRD)]),
    "embedding": lambda x: F.embedding(EVERY_THIRD, x.t()),
    "gather": lambda x: x.gather(1, EVERY_THIRD.expand(len(x), -1)),
    "scatter": lambda x: x.scatter(1, EVERY_THIRD.expand(len(x), -1), 1.5),
    "scatter of a source": lambda x: torch.zeros_like(x).scatter(1, torch.arange(FLAT).flip(0).expand(len(x), -1), x),
    "scatter_add": lambda x: x.scatter_add(1, (torch.arange(FLAT) * 3 % FLAT).expand(len(x), -1), x),
    "scatter_reduce": lambda x: x.scatter_reduce(1, (torch.arange(FLAT) // 2).expand(len(x), -1), x, "amax"),
    "roll": lambda x: x.roll(5, 1),
    "flip": lambda x: x.flip(1),
    "topk": lambda x: x.topk(11, 1)[0],
    "sort": lambda x: x.sort(1)[0],
    "argmax": lambda x: x.argmax(1, keepdim=True) * x,
    "cumsum": lambda x: x.cumsum(1),
    "arange": lambda x: x + torch.arange(FLAT),
    "arange, of another shape": lambda x: x.view(-1, SEQ, WIDTH) * torch.arange(FLAT, 0, -1).view(SEQ, WIDTH),
    "arange, compared": lambda x: torch.where(torch.arange(FLAT) > 20, x, 0.0),
    "one_hot": lambda x: x * F.one_hot(torch.arange(len(x)) * 7 + 3, FLAT),
    "eye": lambda x: x @ torch.eye(FLAT, dtype=x.dtype),
    "tril": lambda x: x.tril(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)) * 9, reduction="none"),
    "dropout": lambda x: F.dropout(x, 0.5),
}


class Flattened(nn.Module):
    """Applies an op to rows that hold a sequence of a linear's columns."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, WIDTH)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.linear(x).tanh().flatten(1)).double().square().sum()


@pytest.mark.parametrize("op", OPS)
def test_positions_are_those_of_the_model(op: str) -> None:
    torch.manual_seed(0)
    model = Flattened(OPS[op]).double()
    x = torch.randn(BATCH, SEQ, 5, dtype=torch.float64)
    report = check(model, "tp=3", (x,), options=Options(recipe="megatron"))
    assert report, report
