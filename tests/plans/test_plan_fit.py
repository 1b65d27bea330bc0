"""A plan for another model, mesh or options is refused with what differs; a moved line is no difference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, Overlap, PlanError, ShardingPlan, plan
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from autoshard.plans.compatibility import check_asked
from autoshard.plans.record import PlanRecord

MESH = Mesh("dp=2,tp=2")


class Tiny(nn.Module):
    def __init__(self, width: int = 8, *, bias: bool = True, act: Any = torch.relu, layers: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, width), nn.Linear(width, 4, bias=bias), act
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.act(self.up(x)))
        for layer in self.layers:
            x = layer(x)
        return x


RECIPE = Options(recipe="fsdp+megatron")


@cache
def made(**model: Any) -> ShardingPlan:
    return plan(Tiny(**model), MESH, (torch.randn(4, 6),), options=RECIPE)


def followed(given: ShardingPlan, model: nn.Module | None = None, x: Tensor | None = None, **how: Any) -> PlanRecord:
    """Return the plan that comes of following `given` for a model and its input."""
    args = (torch.randn(4, 6) if x is None else x,)
    return make_plan(PlanRequest(model or Tiny(), args, {}, MESH, RECIPE, **how), plan=given).plan


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(PlanError) as caught:
        followed(*args, **kwargs)
    return str(caught.value)


def misfit(text: str) -> str:
    return f"the plan does not fit: {text}. Make a plan for this model and these inputs"


def test_a_plan_fits_the_model_it_was_made_for() -> None:
    assert followed(made()).layouts == made().layouts
    assert followed(ShardingPlan.from_json(made().to_json())).layouts == made().layouts


def test_a_parameter_of_another_shape() -> None:
    assert refusal(made(), Tiny(width=10)) == misfit(
        "parameter 'up.weight' is float32[10, 6], the plan's float32[8, 6]; parameter 'up.bias' is float32[10], the "
        "plan's float32[8]; parameter 'down.weight' is float32[4, 10], the plan's float32[4, 8]"
    )


def test_a_parameter_of_another_dtype() -> None:
    class Apart(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T + self.bias  # a product has one dtype, a sum the wider one

    model = Tiny()
    model.up = Apart(model.up.in_features, model.up.out_features)
    model.up.bias = nn.Parameter(model.up.bias.double())
    model.act = lambda x: torch.relu(x).float()
    assert refusal(made(), model) == misfit("parameter 'up.bias' is float64[8], the plan's float32[8]")


def test_parameters_that_are_new_or_gone() -> None:
    assert refusal(made(bias=False)) == misfit("parameter 'down.bias' is not in the plan")
    assert refusal(made(), Tiny(bias=False)) == misfit("the plan has parameter 'down.bias', which is not there")


def test_a_parameter_that_is_frozen_in_one_of_them() -> None:
    frozen = Tiny()
    frozen.up.weight.requires_grad_(False)
    assert refusal(made(), frozen) == misfit("parameter 'up.weight' has requires_grad=False, the plan's True")
    of_frozen = plan(frozen, MESH, (torch.randn(4, 6),), options=RECIPE)
    assert refusal(of_frozen) == misfit("parameter 'up.weight' has requires_grad=True, the plan's False")


def test_many_differences_that_are_alike_are_one() -> None:
    assert refusal(made(), Tiny(layers=5)) == misfit(
        "parameter 'layers.0.weight' is not in the plan (and 4 alike); parameter 'layers.0.bias' is not in the plan "
        "(and 4 alike)"
    )


def test_an_input_of_another_shape() -> None:
    assert refusal(made(), x=torch.randn(8, 6)) == misfit("input 'x' is f32[8, 6], the plan's f32[4, 6]")


def test_a_call_of_another_mode() -> None:
    assert refusal(made(), training=False) == misfit(
        "the call is without gradients, the plan for one with gradients"
    )


def test_a_model_that_computes_something_else() -> None:
    assert refusal(made(), Tiny(act=torch.tanh)) == misfit(
        "the model computes %tanh: f32[4, 8] = tanh(%add) where the plan has %relu: f32[4, 8] = relu(%add)"
    )


def test_another_device_has_other_kernels() -> None:
    elsewhere = replace(made(), settings=replace(made().settings, device="cuda"))
    changed = replace(elsewhere, graphs={"CAPTURED": made().graph("captured").replace("relu", "fused_relu")})
    assert followed(changed).layouts == made().layouts


@pytest.mark.parametrize(
    ("mesh", "options", "expected"),
    [
        ("dp=4,tp=2", RECIPE, "the mesh is dp=4,tp=2, the plan's dp=2,tp=2"),
        ("tp=2,dp=2", RECIPE, "the mesh is tp=2,dp=2, the plan's dp=2,tp=2"),
        ("dp=2,tp=2", Options(recipe="fsdp"), "Options(recipe='fsdp'), the plan has recipe='fsdp+megatron'"),
        (
            "dp=2,tp=2",
            replace(RECIPE, overlap=Overlap(bucket_bytes=0), reshard_after_forward=False),
            "Options(reshard_after_forward=False), the plan has reshard_after_forward='auto'; "
            "Options(overlap={{'bucket_bytes': 0}}), the plan has overlap=True",
        ),
        (
            "dp=2,tp=2",
            replace(RECIPE, params={"up.weight": {"tp": "R"}}),
            "Options(params={{'up.weight': {{'tp': 'R'}}}}), the plan has params=None",
        ),
    ],
    ids=("size", "order", "recipe", "numbers", "params"),
)
def test_another_mesh_or_other_options(mesh: str, options: Options, expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_asked(made(), Mesh(mesh), options)
    taken = (
        " and these options, give the plan's values, or leave options out: then all that a plan depends on is the plan's, and "
        "the others, such as compile and progress, have their defaults"
    )
    advice = f"Make a plan for this mesh{taken if 'Options' in expected else ''}"
    assert str(caught.value) == f"the plan does not fit: {expected.format()}. {advice}"


def test_other_ranks_and_hardware_are_no_difference() -> None:
    check_asked(made(), Mesh("dp=2,tp=2", ranks=(4, 5, 6, 7), hardware="a100"), RECIPE)


def test_another_torch_is_a_warning() -> None:
    old = replace(made(), settings=replace(made().settings, torch="2.11.0"))
    with pytest.warns(UserWarning, match=r"made with torch 2\.11\.0 and runs with 2\."):
        check_asked(old, MESH, RECIPE)
