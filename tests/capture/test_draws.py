"""Random draws that no rule knows are captured as those that one knows, and draw the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture.capture import capture
from passes.rules.rule import rule_of
from tests.capture.comparing import run


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.draw(x)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(2, 6, generator=None),
    "randn": lambda x: torch.randn((2, 6), generator=None, dtype=x.dtype, layout=torch.strided),
    "randint": lambda x: torch.randint(9, (2, 6), generator=None),
    "randint from": lambda x: torch.randint(3, 9, (2, 6), generator=None),
    "randperm": lambda x: torch.randperm(6, generator=None),
    "rand_like": lambda x: torch.rand_like(x, generator=None).repeat(1, 3)[:, :6],
    "randn_like": lambda x: torch.randn_like(x, generator=None).sum(),
    "randint_like": lambda x: torch.randint_like(x, 9, generator=None).sum(),
    "randint_like from": lambda x: torch.randint_like(x, 3, 9, generator=None).sum(),
    "random_": lambda x: torch.empty(2, 6).random_(9),
    "random_ from": lambda x: torch.empty(2, 6, dtype=torch.int64).random_(3, 9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_without_a_generator_has_a_rule(name: str) -> None:
    model, x = Draws(DRAWS[name]), torch.randn(2, 4)
    captured = capture(model, (x,), training=False)
    (drawn,) = (node for node in captured.graph_module.graph.nodes if "rand" in node.name)
    assert rule_of(drawn.target) is not None
    torch.manual_seed(0)
    expected = model(x).detach()
    torch.manual_seed(0)
    torch.testing.assert_close(next(iter(run(captured, model, (x,), {}, {}).values())), expected)
