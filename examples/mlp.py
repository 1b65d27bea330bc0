"""The smallest model with layers: planned in a second, and run on simulated ranks in one process.

    python -m autoshard recipes examples/mlp.py:mlp --mesh dp=2,tp=2 --hardware h100
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class MLP(nn.Module):
    """Residual blocks and a classifier; called with labels, it returns the loss."""

    def __init__(self, layers: int = 2, dim: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def mlp(batch: int = 32, dim: int = 64) -> tuple[MLP, tuple[Tensor, Tensor]]:
    """Return the model and the arguments of one training step with the global batch."""
    return MLP(dim=dim), (torch.randn(batch, dim), torch.zeros(batch, dtype=torch.long))
