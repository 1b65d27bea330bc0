"""A check runs the sharded program on simulated ranks and says what is wrong with it, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import InputError, Options, UserError, check, plan, rule
from autoshard.debug.bisection import bisect
from autoshard.debug.rounding import Rounding, is_among
from autoshard.debug.simulated_ranks import Call
from tests.models import build


@torch.library.custom_op("autoshard_test::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@centred.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return torch.ops.autoshard_test.centred(gradient)


centred.register_autograd(_backward)
rule(torch.ops.autoshard_test.centred.default)("m n -> m n")  # wrong: a mean needs the whole of n


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.autoshard_test.centred(self.up(x)))


def made() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(12, 6)


def test_a_wrong_rule_is_found_with_its_row_and_line() -> None:
    model, x = made()
    found = check(model, "dp=2,tp=2", (x,), options=Options(recipe={"tp": "megatron"}))
    assert not found and found.first is not None
    assert_expected_inline(str(found).replace(str(found.first.error), ""), """\
not equal on 4 simulated ranks (dp=2,tp=2), to within 1e-04:
the first value that differs: %centred = autoshard_test.centred is off by 2.6e-01, test_checking.py:45
  return self.down(torch.ops.autoshard_test.centred(self.up(x)))
  the rule of autoshard_test.centred on dp: R -> R; on tp: S(1) -> S(1)
result output output is off by 3.0e-01
result gradient up.weight is off by 6.8e-01
result gradient down.weight is off by 2.9e-01""")


def test_the_same_rule_is_right_where_it_is_not_used_so() -> None:
    model, x = made()
    found = check(model, "dp=2,tp=2", (x,), options=Options(recipe="fsdp+ddp"))
    assert found and found.compared > 5
    assert_expected_inline(str(found), """\
equal on 4 simulated ranks (dp=2,tp=2)
17 values are within 1e-04 of one device's, as are 3 results of the model
results stay the same after the partition and the passes of overlap""")


@pytest.mark.slow
def test_a_model_is_equal_value_by_value() -> None:
    model, args, kwargs = build("gpt_dropout")
    found = check(model, "dp=2,tp=2", args, kwargs, options=Options(recipe="fsdp+megatron"))
    assert found, str(found)
    assert found.compared > 150
    assert found.results_compared == 1 + len(list(model.parameters())) and not found.rounded


class Normalized(nn.Module):
    """The bias before the normalization has no gradient but rounding; half of the rows are masked with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.silu(self.norm(self.conv(x))).mean(-1)
        scores = self.head(torch.fft.fft(mixed).abs() * mixed)
        return scores.masked_fill(scores < 0, -torch.inf).logsumexp(-1).clamp(min=-9).sum()


def test_what_is_all_rounding_is_equal() -> None:
    torch.manual_seed(0)
    found = check(Normalized(), "dp=2,tp=2", (torch.randn(12, 6, 9),), options=Options(recipe="fsdp+megatron"))
    assert found, str(found)
    assert found.rounded == 3  # as it is made, as it is reduced, and beside the model's
    assert str(found).endswith(
        "\noff by more, but no further than a change in the last digit of numbers moves them: 3"
    )


def test_the_steps_within_a_gradient_formula_are_rounded() -> None:
    """Measure the gradient of a bias before a sum of normalized values: exactly 0 but for the steps of one op."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), torch.randn(8, 4, dtype=torch.float64)
    rounding = Rounding(Call(Summed(model), (x,), {}), torch.float64, training=True)
    assert rounding.of_result("gradients", "model.0.bias", torch.zeros(4, dtype=torch.float64)) > 1e-16


def test_the_sum_within_a_cross_entropy_is_rounded() -> None:
    """Measure a loss near 0: one less than a sum that is rounded to a digit of 1."""
    x, label = torch.zeros(8, 96), torch.arange(8)
    x[label, label] = 17.0
    model = CrossEntropy()
    loss = model(x, label).detach()
    rounding = Rounding(Call(model, (x, label), {}), torch.float32, training=True)
    assert 0 < loss < 1e-5
    assert rounding.of_result("outputs", "output", loss) > 1e-3 * loss


class CrossEntropy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(96))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * x, label)


class Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).sum()


class Plain(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norm(self.conv(x))).mean(-1)).logsumexp(-1).sum()


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_what_is_computed_in(reduce: torch.dtype) -> None:
    torch.manual_seed(0)
    options = Options(recipe="fsdp+megatron", mixed_precision=MixedPrecisionPolicy(torch.bfloat16, reduce))
    found = check(Plain(), "dp=2,tp=2", (torch.randn(12, 6, 9),), options=options)
    assert found and found.rounded, str(found)


class Rectified(nn.Module):
    """A sum that is 1 from left to right, and 0 if its halves are added first, is compared with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(torch.eye(4))
            self.down.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.down(self.up(x))).sum()


def test_what_rounding_decides_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.debug.rounding.LIKELY", 0.0)  # as where changes of the last digit decide nothing else
    x = torch.tensor([[1e8, 1.0, -1e8, 1.0], [3e8, 1e8, 1e8, 0.0]])
    found = check(Rectified(), "tp=2", (x,), options=Options(recipe="megatron"))
    assert found, str(found)
    assert found.rounded == 3  # the comparison and both gradients
    assert bisect(Rectified(), "tp=2", (x,), options=Options(recipe="megatron"))


class Chosen(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.ops.autoshard_test.centred(self.up(x))
        return self.down(torch.where((h > 0) == (h > 1), 1.0, h))  # compares numbers, and what was decided


def test_what_a_wrong_value_decides_is_found() -> None:
    model, x = Chosen(), made()[1]
    found = check(model, "dp=2,tp=2", (x,), options=Options(recipe={"tp": "megatron"}))
    assert found.first is not None and found.first.op == "autoshard_test.centred"
    assert {one.value for one in found.results} == {"output output", "gradient up.weight", "gradient down.weight"}


class Centred(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.ops.autoshard_test.centred(x.flatten(1)).unflatten(1, (6, 9)))


@pytest.mark.slow
def test_a_fault_before_rounding_is_found() -> None:
    torch.manual_seed(0)
    options = Options(recipe={"dp": "fsdp"}, inputs={"x": {"tp": "S(1)"}})
    found = check(Centred(), "dp=2,tp=2", (torch.randn(12, 6, 9),), options=options)
    assert found.first is not None and found.first.op == "autoshard_test.centred"
    assert "gradient conv.weight" in {one.value for one in found.results}


def test_a_default_device_of_the_user_is_not_that_of_what_is_checked() -> None:
    case = build("mlp", dtype=torch.float32)
    with torch.device("meta"):
        assert check(case.model, "dp=2,tp=2", case.args, options=Options(recipe="fsdp+megatron", hardware="h100"))


def test_a_given_plan_is_followed() -> None:
    model, x = made()
    options = Options(recipe="fsdp+ddp", mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    found = check(model, "dp=2,tp=2", (x,), plan=plan(model, "dp=2,tp=2", (x,), options=options))
    assert_expected_inline(str(found), """\
equal on 4 simulated ranks (dp=2,tp=2)
22 values are within 5e-02 of one device's
results stay the same after the partition and the passes of overlap
results not compared with the model's: it computes in another precision""")


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.polar(y.abs(), y).abs().sum()


def test_an_op_that_torch_lacks_in_a_low_precision_is_named() -> None:
    options = Options(recipe="ddp", mixed_precision=MixedPrecisionPolicy(torch.bfloat16))
    with pytest.raises(UserError) as caught:
        check(Turns(), "dp=2", (torch.randn(8, 6),), options=options)
    message, place = str(caught.value).split("\n")
    assert message == (
        "torch does not compute aten.polar.default of bfloat16 on cpu; give it float32, such as x.float(), or leave "
        "mixed_precision out"
    )
    assert place.endswith("return torch.polar(y.abs(), y).abs().sum()")


def test_a_check_needs_values() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(InputError) as caught:
        check(model, "dp=2", (torch.randn(10, 6),))
    assert str(caught.value) == (
        "up.weight is on meta: a check runs the model, so it needs values; give the model values (to_empty and your "
        "initialisation), and tensors as arguments"
    )


class Determinants(nn.Module):
    """The backward of a determinant depends on strides; a rank may hold the matrix with others."""

    def __init__(self) -> None:
        super().__init__()
        self.by_columns = nn.Parameter(torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0])
        self.by_rows = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        batch = x[:, :, None] * self.by_rows + self.by_columns
        logs = torch.linalg.slogdet(self.by_columns)[1] + torch.linalg.slogdet(self.by_rows)[1]
        return logs + (torch.linalg.det(batch) * torch.linalg.det(batch.mT)).mean()


def test_determinants_do_not_depend_on_strides() -> None:
    torch.manual_seed(0)
    model, x = Determinants(), torch.randn(4, 4, dtype=torch.float64)
    found = check(model, "dp=2", (x,), options=Options(recipe="fsdp", compile="eager"))
    assert found and found.compared > 20, str(found)


@pytest.mark.parametrize(("count", "copied"), [(1, 1), (50, 0), (3000, 100), (3000, 3000)])
def test_numbers_that_are_among_others_are_found(count: int, copied: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator).double()
    others = torch.randn(count, generator=generator).double()
    known = torch.cat([torch.tensor([0.0, -0.0, 3.0, torch.inf, torch.nan], dtype=torch.float64), others, values[:copied]])
    given = torch.cat([values, torch.tensor([torch.nan], dtype=torch.float64)])
    assert torch.equal(is_among(given, known), torch.isin(given, known))
    assert not is_among(given, known[:5]).any() and not is_among(given[:0], known).any()
