"""The gradient of an input goes back to outputs of other programs, or to leaves: they take it differently scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard import UserError
from autoshard.runtime.gradient_scale import gradient_scale


def halves(node: Any, number: int) -> float | None:
    """Take `tanh` for a program whose output is split over two ranks."""
    return 0.5 if node.name().startswith("Tanh") else None


def test_inputs_that_come_from_a_program_or_a_leaf() -> None:
    leaf = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    made = leaf.tanh() * torch.ones(3)
    assert gradient_scale("x", made.exp() + made, halves) == 2.0
    assert gradient_scale("x", leaf.exp() + other, halves) == 1.0
    assert gradient_scale("x", leaf, halves) == 1.0
    with pytest.raises(UserError) as error:
        gradient_scale("x", made + other, halves)
    assert str(error.value) == (
        "input 'x' is computed from an output of a sharded model, which takes gradients as of a mean over ranks, and "
        "from another tensor that does not; detach() one of them, or shard the first model with Options(loss='sum')"
    )
