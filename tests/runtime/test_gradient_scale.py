"""The gradient of an input goes back to outputs of other programs, or to leaves: they take it differently scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autoshard import UserError
from autoshard.runtime.gradient_scale import gradient_scale
from passes._torch import reentrant_checkpoint


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


def test_inputs_that_a_reentrant_checkpoint_computes_again() -> None:
    """Its inputs are leaves meanwhile; parameters are not among them."""
    leaf, weight = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    found: list[float] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        node = reentrant_checkpoint()
        if node is not None:
            found.extend((gradient_scale("x", x, halves, node), gradient_scale("x", x * 3, halves, node)))
            found.append(gradient_scale("x", weight * 2, halves, node))
        return x.exp()

    for given in (leaf.tanh() * 2, leaf):
        checkpoint(program, given, use_reentrant=True).sum().backward()
    assert found == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
