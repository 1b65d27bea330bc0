"""Hold a model with asserts in a file of its own: pytest rewrites those of its test files."""

from __future__ import annotations

from torch import Tensor, nn


class Asserts(nn.Module):
    """A layer whose labels are asserted to be in range."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        assert labels.max() < 4, "labels are below 4"
        assert labels.dim() == 1  # known when the model is captured
        return self.layer(x).sum() + labels.sum()
