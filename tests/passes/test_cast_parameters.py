"""Mixed precision is where FSDP2 has it: cast, gather, compute, cast, reduce, cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, UserError
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest

BF16, F32 = torch.bfloat16, torch.float32


def lines(policy: MixedPrecisionPolicy, *words: str) -> list[str]:
    options = Options(recipe="fsdp", mixed_precision=policy)
    planned = make_plan(PlanRequest(nn.Linear(8, 6, bias=False), (torch.zeros(4, 8),), {}, Mesh("dp=2"), options))
    text = planned.plan.graph("collective").splitlines()
    return [line.split("      #")[0] for line in text if any(word in line for word in words)]


def test_parameters_are_cast_before_the_gather_and_gradients_reduced_in_float32() -> None:
    found = lines(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32), "all_gather(", "reduce_scatter(")
    assert found == [
        '%all_gather: bf16[6, 8] {dp:R} recompute = all_gather(%convert_element_type, ["dp"])',
        '%reduce_scatter: f32[6, 8] {dp:S(0)} = reduce_scatter(%convert_element_type_2, ["dp"])',
    ]


def test_gradients_are_reduced_in_the_compute_dtype_where_no_other_is_asked_for() -> None:
    (found,) = lines(MixedPrecisionPolicy(param_dtype=BF16), "reduce_scatter(")
    assert found.startswith("%reduce_scatter: bf16[6, 8] {dp:S(0)} = ")


class Gated(nn.Module):
    """Takes an input that has the name of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * weight


def test_the_gradient_of_an_input_is_reduced_as_the_input_is_and_not_as_a_parameter_of_its_name() -> None:
    options = Options(recipe="ddp", mixed_precision=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))
    args = (torch.zeros(8, 8), torch.zeros(8, 8, requires_grad=True))
    planned = make_plan(PlanRequest(Gated(), args, {}, Mesh("dp=2"), options))
    assert "all_gather(" not in planned.plan.graph("collective")


@pytest.mark.parametrize(("computed", "dtype"), [(None, "float32"), (F32, "float32"), (BF16, "bfloat16")])
def test_a_dtype_that_cannot_hold_what_is_computed_is_refused(computed: torch.dtype | None, dtype: str) -> None:
    with pytest.raises(UserError) as raised:
        lines(MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float16))
    assert str(raised.value) == (
        f"Options(mixed_precision=...): gradients are computed in {dtype}, and float16 does not hold their sums; leave "
        "reduce_dtype out, or compute in float16: param_dtype=torch.float16"
    )


def test_inputs_stay_as_they_are_where_they_are_not_to_be_cast() -> None:
    policy = MixedPrecisionPolicy(param_dtype=F32, cast_forward_inputs=False)
    assert lines(policy, "convert_element_type(") == []


def test_outputs_and_their_tangents_are_of_the_output_dtype() -> None:
    found = lines(MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32), "tangent(", "return", "output(")
    assert '%tangents_output: f32[4, 6] {dp:S(0)} = tangent("output")' in found
    assert lines(MixedPrecisionPolicy(param_dtype=BF16), "tangent(")[0].startswith("%tangents_output: bf16[4, 6]")
