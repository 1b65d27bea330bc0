"""Products per expert: rows, columns and summed terms are shared, and each rank finds the ends of its own rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoshard import Mesh, Options, check, plan
from tests.rules.harness import Case, check_case, floats

NAME = "grouped_mm_fallback"


def product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Compute the product as transformers has it."""
    experts = torch.bucketize(torch.arange(input.shape[0]), offs, right=True)
    return torch.einsum("mk,mkn->mn", input, weight[experts])


def product_backward(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    experts = torch.bucketize(torch.arange(input.shape[0]), offs, right=True)
    rows = torch.einsum("mn,mkn->mk", grad_output, weight[experts])
    terms = torch.einsum("mk,mn->mkn", input, grad_output)
    return rows, torch.zeros_like(weight).index_add(0, experts, terms)


def define() -> None:
    """Define the ops, unless transformers did."""
    if hasattr(torch.ops.transformers, NAME):
        return
    backward = torch.library.custom_op(f"transformers::{NAME}_backward", product_backward, mutates_args=())
    forward = torch.library.custom_op(f"transformers::{NAME}", product, mutates_args=())
    forward.register_fake(lambda input, weight, offs: input.new_empty(input.shape[0], weight.shape[2]))
    backward.register_fake(lambda input, weight, offs, grad: (torch.empty_like(input), torch.empty_like(weight)))

    def differentiate(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight, offs = ctx.saved_tensors  # type: ignore[attr-defined]
        return *backward(input, weight, offs, gradient), None

    forward.register_autograd(
        differentiate, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )


define()
OPS = torch.ops.transformers
ENDS = torch.tensor([3, 3, 12], dtype=torch.int32)
CASES = (
    Case(
        OPS.grouped_mm_fallback.default,
        (floats(12, 4), floats(3, 4, 8), ENDS),
        rows="S(0), R, R -> S(0); R, S(2), R -> S(1); S(1), S(1), R -> P(sum); "
        "P(sum), R, R -> P(sum); R, P(sum), R -> P(sum)",
    ),
    Case(
        OPS.grouped_mm_fallback_backward.default,
        (floats(12, 4), floats(3, 4, 8), ENDS, floats(12, 8)),
        rows="S(0), R, R, S(0) -> S(0), P(sum); R, S(2), R, S(1) -> P(sum), S(2); S(1), S(1), R, R -> S(1), S(1); "
        "R, R, R, P(sum) -> P(sum), P(sum)",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


class Experts(torch.nn.Module):
    """Tokens are sorted by expert, multiplied with two matrices of it, and put back, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.up = torch.nn.Parameter(torch.randn(4, 8, 16))
        self.bias = torch.nn.Parameter(torch.randn(4, 16))
        self.down = torch.nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        expert, order = expert.sort()
        ends = torch.histc(expert.float(), 4, 0, 3).cumsum(0).int()
        up = OPS.grouped_mm_fallback(x[order], self.up, ends) + self.bias[expert]
        down = OPS.grouped_mm_fallback(torch.relu(up), self.down, ends) * weight[order, None]
        return torch.zeros_like(x).index_add(0, order, down).square().mean()


@pytest.mark.slow
def test_experts_are_cut_by_columns_and_then_by_rows_and_share_the_tokens() -> None:
    torch.manual_seed(0)
    model, x = Experts().double(), torch.randn(16, 8, dtype=torch.float64)
    made = plan(model, Mesh("dp=2,tp=2"), (x,), options=Options(recipe={"dp": "fsdp", "tp": "megatron"}))
    assert [str(made.parameters[name].layout.on(1)) for name in ("up", "down")] == ["S(2)", "S(1)"]
    products = [line for line in made.graph("EXPLICIT").splitlines() if "= transformers.grouped_mm_fallback(" in line]
    assert [line.partition("{")[2].partition(",")[0] for line in products] == ["dp:S(0)", "dp:S(0)"]
    found = check(model, Mesh("dp=2,tp=2"), (x,), plan=made)
    assert found, str(found)
