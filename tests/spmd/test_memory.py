"""With fsdp over n ranks, each rank stores one n-th of every parameter and gradient, and the padding of one row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import Options, autoshard
from passes.ir.graph import OutputRole
from tests.models import build
from tests.spawn import run_on_ranks
from tests.spmd.oracle import plan_ranks


def _bound(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of an n-th, with a row more where the rows do not divide."""
    return math.prod((-(-shape[0] // ranks), *shape[1:])) if shape else 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "llama")] + ["mlp_uneven", "irregular", "conv_net"]
)
@pytest.mark.parametrize(("mesh", "recipe"), [("dp=4", "fsdp"), ("a=2,b=2", "fsdp"), ("dp=4", "zero2")])
def test_parameters_and_gradients_are_stored_in_parts(name: str, mesh: str, recipe: str) -> None:
    ranks = plan_ranks(build(name), mesh, Options(recipe=recipe))
    for held, given in zip(ranks.held, ranks.run().parts, strict=True):
        gradients = {output.name: part for output, part in given.items() if output.role is OutputRole.GRADIENT}
        parts = {key.name: part for key, part in held.items()}
        for parameter, value in ranks.planned.plan.parameters.items():
            bound = _bound(value.shape, ranks.mesh.size)
            assert parts[parameter].numel() <= bound, parameter
            assert gradients.get(parameter, parts[parameter]).shape == parts[parameter].shape, parameter


@pytest.mark.slow
def test_what_divides_has_no_padding() -> None:
    plan = plan_ranks(build("llama"), "dp=8", Options(recipe="fsdp")).planned.plan
    for name, value in plan.parameters.items():
        assert math.prod(value.local_shape(plan.mesh)) * 8 == math.prod(value.shape), name


@pytest.mark.slow
def test_tensor_parallel_ranks_store_their_part_of_what_megatron_shards() -> None:
    plan = plan_ranks(build("llama"), "dp=2,tp=4", Options(recipe="fsdp+megatron")).planned.plan
    stored = {name: math.prod(v.shape) / math.prod(v.local_shape(plan.mesh)) for name, v in plan.parameters.items()}
    assert {name for name, ways in stored.items() if ways == 2} == {n for n in stored if "norm" in n}
    assert {ways for name, ways in stored.items() if "norm" not in name} == {8}


def test_gathered_parameters_are_not_kept_for_the_backward() -> None:
    case = build("mlp")
    kept = {recipe: plan_ranks(case, "dp=2", Options(recipe=recipe)).planned.plan for recipe in ("fsdp", "zero2")}
    again = [c.what for c in kept["fsdp"].collectives if c.recomputed]
    weights = [f"parameter {name}" for name, parameter in case.model.named_parameters() if parameter.dim() > 1]
    assert sorted(again) == sorted(weights[1:])  # no backward needs a bias, nor the weight that the input meets
    assert not any(c.recomputed for c in kept["zero2"].collectives)


@pytest.mark.slow
@pytest.mark.gloo
def test_stored_bytes_and_graphs_on_real_ranks() -> None:
    reports = run_on_ranks(_measure, 2, "mlp_uneven")
    model = build("mlp_uneven").model
    bounds = {name: _bound(tuple(p.shape), 2) * p.element_size() for name, p in model.named_parameters()}
    for parameters, gradients, _ in reports:
        assert parameters.keys() == gradients.keys() == bounds.keys()
        for name, bound in bounds.items():
            assert parameters[name] <= bound and gradients[name] <= bound, name
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(sum(parameters.values()) for parameters, _, _ in reports) == total, "DTensors hold no padding"
    assert len({graph for _, _, graph in reports}) == 1, "the graph differs between ranks"


def _measure(rank: int, name: str) -> tuple[dict[str, int], dict[str, int], str]:
    """Return the bytes of this rank's part of each parameter and gradient, and its graph."""
    case = build(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = autoshard(case.model, mesh, case.args, case.kwargs, options=Options(recipe="fsdp", compile="eager"))
    model(*model.shard(*case.args)).backward()
    parameters = dict(model.named_parameters())
    return (
        {name: _bytes(parameter) for name, parameter in parameters.items()},
        {name: _bytes(parameter.grad) for name, parameter in parameters.items()},
        model.plan.graph("LOCAL"),
    )


def _bytes(tensor: Any) -> int:
    assert isinstance(tensor, DTensor)
    part = tensor.to_local()
    return part.numel() * part.element_size()
