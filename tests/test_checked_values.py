"""What a check sees: dropout and attention, memory that is not written, gradients of arguments, low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from autoshard import Options, check
from autoshard.debug.checking import Check
from passes.ir.graph import draws

aten = torch.ops.aten
OPTIONS = Options(recipe="fsdp+megatron")


class Around(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, after: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(8, 8), after

    def forward(self, *args: Any) -> Tensor:
        return self.after(self.linear, *args)


def checked(after: Callable[..., Tensor], *args: Any, dtype: torch.dtype = torch.float64) -> Check:
    torch.manual_seed(0)
    return check(Around(after).to(dtype), "dp=2,tp=2", args or (torch.randn(8, 8, dtype=dtype),), options=OPTIONS)


def test_a_call_draws_where_its_probability_is_not_0() -> None:
    qkv = (torch.empty(1),) * 3
    attention, dropout = aten._scaled_dot_product_flash_attention_for_cpu.default, aten.native_dropout.default
    assert not draws(attention, qkv, {}) and draws(attention, (*qkv, 0.1), {}) and draws(attention, qkv, {"dropout_p": 0.1})
    assert draws(dropout, (*qkv[:1], 0.5, True), {}) and draws(dropout, (*qkv[:1], 0.5, None), {})
    assert not draws(dropout, (*qkv[:1], 0.0, True), {}) and not draws(dropout, (*qkv[:1], 0.5, False), {})
    assert draws(aten.rand.default, ([4],), {}) and not draws(aten.mm.default, qkv[:2], {})


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = x.view(4, 2, 2, 4)
    return q, q * 2, q + 1


def test_attention_is_compared() -> None:
    assert_expected_inline(str(checked(lambda linear, x: F.scaled_dot_product_attention(*heads(linear(x))))), """\
equal on 4 simulated ranks (dp=2,tp=2)
25 values are within 1e-09 of one device's, as are 3 results of the model
results stay the same after the partition and the passes of overlap""")


DRAWS = {
    "dropout": lambda linear, x: F.dropout(linear(x), 0.3),
    "attention": lambda linear, x: F.scaled_dot_product_attention(*heads(linear(x)), dropout_p=0.2),
    "two": lambda linear, x: linear(x) * torch.rand(8, 8) + torch.randn_like(x),
    "gumbel": lambda linear, x: F.gumbel_softmax(linear(x)),
    "bernoulli": lambda linear, x: linear(x) * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda linear, x: linear(x).gather(1, x.softmax(1).multinomial(3)),
    "categorical": lambda linear, x: linear(x)[:, Categorical(logits=x).sample((2,)).flatten()],
    "order": lambda linear, x: linear(x)[torch.randperm(8)],
    "recomputed": lambda linear, x: checkpoint(lambda y: F.dropout(linear(y).relu(), 0.3), x, use_reentrant=False),
    "dropout2d": lambda linear, x: F.dropout2d(linear(x).view(8, 4, 2)),  # `bernoulli_` with its default
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_the_same_on_both_sides(name: str) -> None:
    found = checked(DRAWS[name])
    assert found and found.results_compared == 3 and not found.rounded, str(found)
    never = {"never written to": 1} if name == "dropout2d" else {}
    assert found.left_out == {"drawn at random": 2 if name == "two" else 1} | never


def test_other_draws_are_said() -> None:
    first, count, *rest = str(checked(lambda linear, x: F.rrelu(linear(x), training=True))).splitlines()
    assert first == "equal on 4 simulated ranks (dp=2,tp=2)" and count.endswith(" values are within 1e-09 of one device's")
    said = "\n".join(rest).replace("uniform.default float64[8, 8]", "rand.default float64[64]")  # as torch 2.14 traces it
    assert_expected_inline(said.replace(", ", ",\n"), """\
results stay the same after the partition and the passes of overlap
values not compared: 1 drawn at random
results not compared with the model's: random numbers cannot be made the same,
its draw 1 is aten.rrelu_with_noise.default float64[8,
8],
that of the program is aten.rand.default float64[64]""")


def test_numbers_that_only_the_model_draws_are_a_difference() -> None:
    """A function that a trace does not see: it stands for what capture would lose."""

    def lost(linear: nn.Module, x: Tensor) -> Tensor:
        return linear(x) if torch.compiler.is_compiling() else F.dropout(linear(x), 0.5)

    assert "gradient linear.weight" in {one.value for one in checked(lost).results}


def filled(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    made = torch.empty_like(y)
    made[:4], made[4:] = y[:4], y[4:] * 2
    return made


def assigned(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x) * 1
    y[:, :4] = y[:, 4:] * 2
    return y


@pytest.mark.parametrize("after", [filled, assigned])
def test_memory_that_is_not_written_is_not_compared(after: Callable[..., Tensor]) -> None:
    found = checked(after)
    assert found and found.results_compared == 3 and found.left_out.keys() == {"never written to"}, str(found)


def test_gradients_of_arguments_are_compared_wherever_they_stand() -> None:
    x, y = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = checked(lambda linear, batch: linear(batch["x"]) * batch["more"]["y"][0], {"x": x, "more": {"y": [y]}})
    assert found and found.results_compared == 5, str(found)


def test_autocast_has_the_tolerance_of_what_it_computes_in() -> None:
    def low(linear: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(linear(x)).float().sum()

    found = checked(low, dtype=torch.float32)
    assert found and found.tolerance == 5e-2, str(found)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x) + 100)).mean((2, 3))).logsumexp(-1).mean()


def test_rounding_in_a_batch_norm_is_no_difference() -> None:
    torch.manual_seed(0)
    assert check(Normed(), "dp=2,tp=2", (torch.randn(8, 3, 8, 8),), options=OPTIONS)
