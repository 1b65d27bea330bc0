"""A step on a mesh gives the numbers of one device, for every recipe and product of recipes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from autoshard import Options
from passes.ir.graph import Input, InputRole, OutputRole
from tests.models import GPT, MODELS, Case, Llama, build
from tests.spmd.decoders import DECODERS
from tests.spmd.oddities import ODDITIES
from tests.spmd.oracle import (
    TOLERANCE,
    Ranks,
    Reference,
    Step,
    check_step,
    compare,
    plan_ranks,
    relative_error,
    run_on_one_device,
    run_on_ranks,
)

Recipe = str | Mapping[str, str | None] | None

FAST: list[tuple[str, Recipe]] = [
    ("dp=4", "fsdp"),
    ("tp=4", "megatron"),
    ("dp=2,tp=2", "fsdp+megatron"),
    ("tp=2,dp=2", {"tp": "megatron", "dp": "fsdp"}),
    ("r=2,dp=2,tp=2", {"r": "ddp", "dp": "fsdp", "tp": "megatron"}),
    ("t=2,u=2", "megatron"),
]
SLOW: list[tuple[str, Recipe]] = [
    ("dp=2", "ddp"),
    ("dp=8", "ddp"),
    ("dp=2", "zero2"),
    ("dp=8", "zero2"),
    ("dp=2", "fsdp"),
    ("dp=8", "fsdp"),
    ("tp=2", "megatron"),
    ("tp=8", "megatron"),
    ("a=2,b=2", "ddp"),
    ("a=4,b=2", "fsdp"),
    ("a=2,b=2,c=2", "fsdp"),
    ("a=2,b=2,c=2", {"a": "fsdp", "b": "zero2", "c": "ddp"}),
    ("a=2,b=4", "hsdp"),
    ("r=2,s=2,tp=2", {"r": "hsdp", "s": "hsdp", "tp": "megatron"}),
    ("t=2,u=4", "megatron"),
    ("t=2,dp=2,u=2", {"t": "megatron", "dp": "fsdp", "u": "megatron"}),
    ("dp=2,tp=2", "ddp+megatron"),
    ("dp=2,tp=2", "zero2+megatron"),
    ("dp=2,tp=4", "fsdp+megatron"),
    ("dp=4,tp=2", "fsdp+megatron"),
    ("tp=4,dp=2", {"tp": "megatron", "dp": "zero2"}),
    ("tp=2,dp=2,r=2", {"tp": "megatron", "dp": "fsdp", "r": "ddp"}),
    ("dp=1", "fsdp"),
    ("dp=1,tp=1", "fsdp+megatron"),
    ("dp=1,tp=2", "fsdp+megatron"),
    ("dp=2,tp=1", "fsdp+megatron"),
    ("idle=2,tp=2", {"idle": None, "tp": "megatron"}),
    ("idle=2", None),
]
THREES: list[tuple[str, Recipe]] = [
    ("dp=3", "ddp"),
    ("dp=3", "fsdp"),
    ("tp=3", "megatron"),
    ("dp=3,tp=2", "fsdp+megatron"),
    ("tp=3,dp=2", {"tp": "megatron", "dp": "fsdp"}),
]
DETERMINISTIC = [name for name in MODELS if name != "gpt_dropout"]
OTHERS: dict[str, Callable[[], Case]] = {**DECODERS, **ODDITIES}


QUICK = ("mlp", "mlp_uneven", "conv_net", "moe", "irregular", "structured")  # models that are planned in about a second


def slow_but(quick: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Return parameters of which all but the `quick` ones are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


def format_id(value: object) -> str:
    if isinstance(value, Mapping):
        return "+".join(str(recipe) for recipe in value.values())
    return str(value)


@lru_cache(maxsize=4)  # tests of one model stand next to each other
def reference(name: str, dtype: torch.dtype = torch.float64) -> Reference:
    return Reference.of(build(name, dtype=dtype))


def _check(name: str, mesh: str, recipe: Recipe) -> None:
    made = reference(name).check(mesh, Options(recipe=recipe)).planned.plan
    is_padded = any(remark.pass_name == "pad" for remark in made.remarks)  # padded heads are stored in other parts
    if name.startswith(("gpt", "llama")) and not is_padded:
        assert made.count("all_to_all") == 0, "no decoder needs one"


@lru_cache(maxsize=4)
def _other(name: str) -> Reference:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Reference.of(OTHERS[name]())


@lru_cache(maxsize=4)
def _in_threes(name: str) -> Reference:
    """Return batch, sequence and heads that divide by 3."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"layers": 1, "heads": 6, "seq": 12}
        model = GPT(dim=48, **sizes) if name == "gpt" else Llama(dim=48, kv_heads=3, hidden=60, **sizes)
        return Reference.of(Case(model.double(), (torch.randint(96, (6, 12)), torch.randint(96, (6, 12))), {}))


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [*FAST[:3], *(pytest.param(*choice, marks=pytest.mark.slow) for choice in FAST[3:])],
    ids=format_id,
)
def test_a_step_equals_one_device(name: str, mesh: str, recipe: Recipe) -> None:
    _check(name, mesh, recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    [(("gpt", "llama")[number % 2], *choice) for number, choice in enumerate(SLOW)],
    ids=format_id,
)
def test_a_step_equals_one_device_on_every_mesh(name: str, mesh: str, recipe: Recipe) -> None:
    _check(name, mesh, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(("mesh", "recipe"), THREES, ids=format_id)
def test_axes_of_three_ranks(name: str, mesh: str, recipe: Recipe) -> None:
    _in_threes(name).check(mesh, Options(recipe=recipe))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(("mesh", "recipe"), FAST[1:3], ids=format_id)
def test_a_step_in_float32(name: str, mesh: str, recipe: Recipe) -> None:
    reference(name, torch.float32).check(mesh, Options(recipe=recipe))


@pytest.mark.parametrize("name", slow_but(QUICK, [name for name in DETERMINISTIC if name not in ("gpt", "llama")]))
def test_every_model_of_the_zoo(name: str) -> None:
    _check(name, "dp=2,tp=2", "fsdp+megatron")


def in_turn(names: Iterable[str], *choices: list[tuple[str, Recipe]]) -> list[tuple[str, str, Recipe]]:
    """Yield each name with one of each choices, taken in turn: every name meets every kind, every choice meets many names."""
    return [(name, *group[number % len(group)]) for number, name in enumerate(names) for group in choices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    in_turn(
        [name for name in DETERMINISTIC if name not in ("gpt", "llama")],
        [FAST[0], FAST[3], ("dp=4", "ddp"), FAST[4], ("dp=4", "zero2")],
        [FAST[1], FAST[5]],
    ),
    ids=format_id,
)
def test_every_model_of_the_zoo_on_other_meshes(name: str, mesh: str, recipe: Recipe) -> None:
    _check(name, mesh, recipe)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "recipe"), in_turn(OTHERS, [FAST[1], FAST[2], FAST[1], FAST[3]]), ids=format_id)
def test_other_models(name: str, mesh: str, recipe: Recipe) -> None:
    _other(name).check(mesh, Options(recipe=recipe))


@pytest.mark.slow
@pytest.mark.parametrize("name", ODDITIES)
def test_odd_models_with_a_split_batch(name: str) -> None:
    _other(name).check("dp=4", Options(recipe="fsdp"))


@pytest.mark.parametrize("name", slow_but(["conv_net"], ["gpt_dict", "llama", "conv_net"]))
def test_the_forward_alone(name: str) -> None:
    case = build(name)
    ranks = plan_ranks(case, "dp=2,tp=2", Options(recipe="fsdp+megatron"), training=False)
    compare(ranks.run().step, run_on_one_device(case, training=False), TOLERANCE[torch.float64])


def test_evaluation_uses_running_statistics() -> None:
    case = build("conv_net")
    case.model.eval()
    ranks = plan_ranks(case, "dp=4", Options(recipe="fsdp"), training=False)
    step = ranks.run().step
    compare(step, run_on_one_device(case, training=False), TOLERANCE[torch.float64])
    assert not step.buffers


# --- placements instead of recipes


def test_placements_alone_make_a_tensor_parallel_mlp() -> None:
    params = {"layers.0.weight": {"tp": Shard(0)}, "layers.0.bias": {"tp": Shard(0)}, "layers.1.weight": {"tp": "S(1)"}}
    ranks = check_step(build("mlp"), "tp=4", Options(recipe=None, params=params))
    assert str(ranks.planned.plan.parameters["layers.0.weight"].layout.on(0)) == "S(0)"
    assert ranks.planned.plan.count("all_gather", backward=False) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        Options(recipe=None, inputs={"tokens": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}),
        Options(recipe=None, inputs={"tokens": {"dp": Shard(1)}, "labels": {"dp": Shard(1)}}),
        Options(recipe=None, inputs={"tokens": {"dp": Shard(0), "tp": Shard(1)}}),
        Options(recipe=None, inputs={"*": {"dp": Shard(0), "tp": Shard(0)}}),
        Options(recipe=None, params={"blocks.*.up.*": {"tp": Shard(0)}, "blocks.*.down.weight": {"tp": Shard(1)}}),
        Options(recipe=None, params={"*.weight": {"dp": "S(0)", "tp": "S(0)"}}),
        Options(recipe=None, params={"blocks.*.weight": {"tp": Shard(-1)}, "tok.weight": {"dp": Shard(1)}}),
        Options(recipe="fsdp", params={"tok.weight": {"dp": Replicate()}, "blocks.0.*": {"tp": "R"}}),
        Options(recipe={"tp": "megatron"}, params={"blocks.*.attn.qkv.weight": {"tp": Shard(1)}}),
        Options(recipe={"dp": "fsdp", "tp": "megatron"}, params={"blocks.1.up.weight": {"tp": "R"}}),
        Options(recipe={"dp": "fsdp", "tp": "megatron"}, params={"blocks.*.qkv.*": {"tp": Shard(0)}}),
        Options(recipe={"dp": "fsdp", "tp": "megatron"}, inputs={"tokens": {"tp": Shard(1)}}),
    ],
    ids=lambda options: " ".join(map(str, (options.recipe, options.params or options.inputs))),
)
def test_whatever_is_insisted_on_gives_the_same_numbers(options: Options) -> None:
    ranks = reference("gpt").check("dp=2,tp=2", options)
    plan = ranks.planned.plan
    for held, values in ((options.params, plan.parameters), (options.inputs, plan.inputs)):
        for name, axes in (held or {}).items():
            for axis, placement in axes.items() if name in values else ():
                got = str(values[name].layout.on(ranks.mesh.index(axis)))
                assert isinstance(placement, Shard) == got.startswith("S"), f"{name} is {got} on {axis}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        {"dp": "S(0)", "tp": "S(2)"},
        pytest.param({"dp": "R", "tp": "R"}, marks=pytest.mark.slow),
        pytest.param({"dp": "S(1)"}, marks=pytest.mark.slow),
        pytest.param({"tp": "S(1)"}, marks=pytest.mark.slow),
    ],
)
def test_outputs_are_laid_out_as_insisted(placement: Mapping[str, str]) -> None:
    options = Options(recipe="fsdp+megatron", outputs={"logits": placement})
    ranks = reference("gpt_dict").check("dp=2,tp=2", options)
    layout = ranks.planned.plan.outputs["logits"].layout
    assert {axis: str(layout.on(ranks.mesh.index(axis))) for axis in placement} == placement


# --- random numbers


@pytest.fixture(scope="module")
def dropped() -> Step:
    return run_on_ranks(build("gpt_dropout"), "dp=1", Options(recipe="fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [FAST[2], *(pytest.param(*choice, marks=pytest.mark.slow) for choice in (FAST[1], *FAST[3:5]))],
    ids=format_id,
)
def test_dropout_is_the_same_on_every_mesh(mesh: str, recipe: Recipe, dropped: Step) -> None:
    step = run_on_ranks(build("gpt_dropout"), mesh, Options(recipe=recipe))
    compare(step, dropped, TOLERANCE[torch.float64])


@pytest.mark.slow
def test_dropout_differs_between_steps_and_from_no_dropout() -> None:
    ranks = plan_ranks(build("gpt_dropout"), "dp=2", Options(recipe="ddp"))
    losses = [ranks.run(seed).step.outputs["output"].item() for seed in (1, 2)]
    losses.append(run_on_one_device(build("gpt")).outputs["output"].item())
    assert len({round(loss, 9) for loss in losses}) == 3


@pytest.mark.slow
def test_dropout_in_evaluation_does_nothing() -> None:
    case = build("gpt_dropout")
    case.model.eval()
    check_step(case, "dp=2,tp=2", Options(recipe="fsdp+megatron"))


# --- training


def _train(ranks: Ranks, steps: int) -> list[float]:
    """Train by AdamW on every rank's own parts: it is elementwise, so no rank needs another's. Return the losses."""
    optimizers = []
    for held in ranks.held:
        parts = {key.name: part.requires_grad_() for key, part in held.items() if key.role is InputRole.PARAMETER}
        optimizers.append((torch.optim.AdamW(parts.values(), lr=1e-2), parts))
    losses = []
    for _ in range(steps):
        with torch.no_grad():
            results = ranks.run()
        losses.append(results.step.outputs["output"].item())
        for (optimizer, parts), held, given in zip(optimizers, ranks.held, results.parts, strict=True):
            for output, part in given.items():
                if output.role is OutputRole.GRADIENT:
                    parts[output.name].grad = part
                elif output.role is OutputRole.BUFFER:
                    held[Input(InputRole.BUFFER, output.name)] = part
            optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    [
        ("gpt", "dp=2,tp=2", "fsdp+megatron"),
        pytest.param("llama", "tp=2,dp=2", {"tp": "megatron", "dp": "fsdp"}, marks=pytest.mark.slow),
        ("conv_net", "dp=4", "fsdp"),
        ("mlp_uneven", "dp=4", "fsdp"),
        ("irregular", "dp=2,tp=2", "fsdp+megatron"),
    ],
    ids=format_id,
)
def test_ten_steps_of_adamw_stay_equal(name: str, mesh: str, recipe: Recipe) -> None:
    case = build(name)
    ranks = plan_ranks(case, mesh, Options(recipe=recipe))
    losses = _train(ranks, 10)
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        optimizer.zero_grad()
        loss = model(*case.args, **case.kwargs)
        loss.backward()
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-10), f"step {step}"
    for parameter in ranks.planned.plan.parameters:
        got, want = ranks.parameter(parameter).detach(), model.get_parameter(parameter).detach()
        assert relative_error(got, want) < 1e-9, parameter


# --- mixed precision


def _cast(case: Case, dtype: torch.dtype) -> Case:
    """Return the casts by hand: the model and its floating inputs in the compute dtype."""
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (case.args, case.kwargs)
    )
    return Case(copy.deepcopy(case.model).to(dtype), args, kwargs)


@pytest.mark.parametrize(
    ("mesh", "recipe"), [("dp=4", "fsdp"), ("dp=2,tp=2", "fsdp+megatron"), ("dp=2", "ddp")], ids=format_id
)
@pytest.mark.parametrize("name", slow_but(["mlp"], ["gpt", "mlp"]))
def test_mixed_precision_computes_in_the_lower_dtype(name: str, mesh: str, recipe: Recipe) -> None:
    """Store float64 and compute float32: the casts can be compared to seven digits."""
    case, policy = build(name), MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    got = plan_ranks(case, mesh, Options(recipe=recipe, mixed_precision=policy)).run().step
    want = run_on_one_device(_cast(case, torch.float32))
    assert all(gradient.dtype is torch.float64 for gradient in got.gradients.values())
    gradients = {name: gradient.double() for name, gradient in want.gradients.items()}
    compare(got, replace(want, gradients=gradients), TOLERANCE[torch.float32])
    exact = run_on_one_device(case)
    worst = max(relative_error(got.gradients[name], exact.gradients[name]) for name in exact.gradients)
    assert worst > 1e-9, "nothing was computed in float32"


@pytest.mark.parametrize(("mesh", "recipe"), [("dp=4", "fsdp"), ("dp=4", "zero2"), ("dp=2,tp=2", "fsdp+megatron")], ids=format_id)
@pytest.mark.parametrize("reduce", [None, torch.float64])
def test_what_does_not_divide_is_cast_where_it_is_stored(reduce: torch.dtype | None, mesh: str, recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)).double()
    case, policy = Case(model, (torch.randn(8, 6).double(),), {}), MixedPrecisionPolicy(torch.float32, reduce)
    ranks = plan_ranks(case, mesh, Options(recipe=recipe, mixed_precision=policy))
    want = run_on_one_device(_cast(case, torch.float32))
    gradients = {name: gradient.double() for name, gradient in want.gradients.items()}
    compare(ranks.run().step, replace(want, gradients=gradients), TOLERANCE[torch.float32])
    gathers = [one for one in ranks.planned.plan.collectives if one.kind == "all_gather"]
    wide = [line for line in ranks.planned.plan.graph("COLLECTIVE").splitlines() if "= all_gather(" in line and ": f64" in line]
    assert gathers and not wide


@pytest.mark.parametrize("reduce", [None, torch.float64])
def test_parameters_of_one_element_are_computed_in_the_lower_dtype(reduce: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 1), nn.BatchNorm1d(1)).double()
    case, policy = Case(model, (torch.randn(8, 6).double(),), {}), MixedPrecisionPolicy(torch.float32, reduce)
    got = plan_ranks(case, "dp=2", Options(recipe="fsdp", mixed_precision=policy)).run().step
    want = run_on_one_device(_cast(case, torch.float32))
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        assert relative_error(got.gradients[name], gradient.double(), 1e-3) < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
def test_bfloat16_is_near_and_moves_half_the_bytes(reduce: torch.dtype | None) -> None:
    case = build("gpt", dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    plain = plan_ranks(case, "dp=4", Options(recipe="fsdp"))
    mixed = plan_ranks(case, "dp=4", Options(recipe="fsdp", mixed_precision=policy))
    got, want = mixed.run().step, run_on_one_device(_cast(case, torch.bfloat16))
    assert relative_error(got.outputs["output"], want.outputs["output"]) < 1e-2
    for name, gradient in got.gradients.items():
        assert gradient.dtype is torch.float32
        assert relative_error(gradient, want.gradients[name], 1e-3) < 5e-2, name
    ratio = 1 if reduce is torch.float32 else 2
    for kind, times in (("all_gather", 2), ("reduce_scatter", ratio)):
        sent = [sum(c.bytes for c in r.planned.plan.collectives if c.kind == kind) for r in (plain, mixed)]
        # The gradients of norms are summed in float32 whatever the dtype, as in PyTorch.
        assert sent[0] == pytest.approx(times * sent[1], rel=0.01), kind
