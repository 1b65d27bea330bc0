"""Real ranks train as one device does: losses, every gradient and ten AdamW steps, eager and compiled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from tests.models import build
from tests.spawn import run_on_ranks
from tests.spmd.oracle import NOISE, relative_error

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

STEPS = 10
DECODERS = ("gpt", "llama")  # two layers compile twice as long
TOLERANCE = 1e-10  # relative, float64

Setting = tuple[str, dict[str, int], dict[str, str]]  # model of the zoo, of one layer, mesh, recipe per axis
Errors = dict[str, float]


EAGER: list[Setting] = [
    ("gpt", {"tp": 2, "dp": 2}, {"tp": "megatron", "dp": "fsdp"}),
    ("mlp", {"a": 2, "b": 2}, {"a": "hsdp", "b": "hsdp"}),
    ("conv_net", {"dp": 4}, {"dp": "zero2"}),
    ("irregular", {"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "megatron"}),
    ("moe", {"dp": 2, "tp": 2}, {"dp": "fsdp", "tp": "megatron"}),
]
COMPILED: list[Setting] = [
    ("llama", {"dp": 2, "tp": 2}, {"dp": "fsdp", "tp": "megatron"}),
    ("mlp_uneven", {"dp": 4}, {"dp": "fsdp"}),
]


def test_ten_steps_op_by_op() -> None:
    _check(run_on_ranks(_train, 4, EAGER, "eager", timeout=300), EAGER)


def test_ten_steps_compiled() -> None:
    _check(run_on_ranks(_train, 4, COMPILED, "inductor", timeout=400), COMPILED)


def _check(reports: list[list[list[Errors]]], settings: list[Setting]) -> None:
    for rank, errors in enumerate(reports):
        for setting, steps in zip(settings, errors, strict=True):
            for step, error in enumerate(steps):
                assert max(error.values()) < TOLERANCE, f"{setting}, rank {rank}, step {step}: {error}"


def _train(rank: int, settings: list[Setting], mode: Any) -> list[list[Errors]]:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return [_errors(*setting, mode) for setting in settings]


def _errors(name: str, axes: dict[str, int], recipe: dict[str, str], mode: Any) -> list[Errors]:
    """Return the relative error of the loss and of the worst gradient per step, and of the worst buffer at the end."""
    case = build(name, **({"layers": 1} if name in DECODERS else {}))
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = autoshard(case.model, mesh, case.args, case.kwargs, options=Options(recipe=recipe, compile=mode))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, case.model)]
    parts = model.shard(*case.args)
    errors = []
    for _ in range(STEPS):
        loss, want = model(*parts), case.model(*case.args)
        loss.backward()
        want.backward()
        errors.append({"loss": relative_error(loss, want), "gradient": _worst(model, case.model)})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    buffers = zip(model.buffers(), case.model.buffers(), strict=True)
    errors.append({"buffer": max((relative_error(got, want) for got, want in buffers), default=0.0)})
    return errors


def _worst(model: Any, reference: torch.nn.Module) -> float:
    """Return the worst relative error of a gradient; both models have the same parameters in the same order."""
    parameters = dict(reference.named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    floor = NOISE * max(gradient.norm().item() for gradient in gradients.values() if gradient is not None)
    worst = 0.0
    for name, parameter in model.named_parameters():
        want = gradients[name]
        assert (want is None) == (parameter.grad is None), name
        if want is not None:
            worst = max(worst, relative_error(parameter.grad.full_tensor(), want, floor))
    return worst
