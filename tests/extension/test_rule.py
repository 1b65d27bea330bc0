"""What it costs to add a sharding rule: one line for an op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoshard


@torch.library.custom_op("autoshard_extension::scaled_product", mutates_args=())
def scaled_product(left: Tensor, right: Tensor) -> Tensor:
    return 2 * left @ right


scaled_product.register_fake(lambda left, right: left.new_empty(left.shape[0], right.shape[1]))
scaled_product.register_autograd(
    lambda ctx, gradient: (2 * gradient @ ctx.saved_tensors[1].T, 2 * ctx.saved_tensors[0].T @ gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

autoshard.rule(torch.ops.autoshard_extension.scaled_product.default)("m k, k n -> m n")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_product(x, self.weight).sin().sum()


def test_an_op_with_a_rule_is_sharded_and_computes_what_one_device_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    options = autoshard.Options(recipe=None, params={"weight": {"tp": "S(1)"}}, inputs={"x": {"dp": "S(0)"}})
    made = autoshard.plan(Model(), "dp=2,tp=2", (x,), options=options)
    assert "{dp:S(0), tp:S(1)} = autoshard_extension.scaled_product" in made.graph("EXPLICIT")
    assert autoshard.check(Model(), "dp=2,tp=2", (x,), options=options)
