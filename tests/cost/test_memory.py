"""The memory that is predicted is the memory that a step takes, measured on one rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from autoshard.compile.compiled import Mode, Split, split_program
from autoshard.config.options import Options
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes.cost.build_program import program_of
from passes.cost.liveness import bytes_by_kind
from passes.cost.program import STATE, Program
from passes.cost.simulate import Timeline, simulate
from passes.ir.mesh import Mesh
from tests.cost.measured import measure_step
from tests.models import GPT, MLP, Case, ConvNet, Llama, build


def _tokens(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch, seq, dtype=torch.int64), torch.zeros(batch, seq, dtype=torch.int64)


CASES: dict[str, tuple[Callable[[], Case], str, str]] = {  # model, mesh, recipe ("auto": searched)
    "gpt": (lambda: Case(GPT(layers=2, seq=64), _tokens(16, 64), {}), "dp=2,tp=2", "fsdp+megatron"),
    "llama, long sequence": (lambda: Case(Llama(layers=1, seq=512), _tokens(16, 512), {}), "dp=8", "fsdp"),
    "conv_net": (
        lambda: Case(ConvNet(64), (torch.zeros(32, 3, 24, 24), torch.zeros(32, dtype=torch.int64)), {}),
        "dp=2",
        "ddp",
    ),
    "mlp, large batch": (
        lambda: Case(MLP((96, 384, 192, 64)), (torch.zeros(4096, 96), torch.zeros(4096, 64)), {}),
        "dp=2,tp=4",
        "zero2+megatron",
    ),
    "gpt of one layer": (lambda: Case(GPT(layers=1, seq=64), _tokens(16, 64), {}), "tp=2", "megatron"),
    "encoder, all parameters in one bucket": (lambda: build("encoder", dtype=torch.float32), "dp=2", "fsdp"),
    "experts": (lambda: build("moe", dtype=torch.float32), "dp=2", "zero2"),
    "searched mlp": (
        lambda: Case(MLP((96, 384, 192, 64)), (torch.zeros(512, 96), torch.zeros(512, 64)), {}),
        "dp=2,tp=2",
        "auto",
    ),
}
LOOSE = {"conv_net": 0.1, "experts": 0.03}  # what a convolution, or a batched product, takes for itself is estimated
QUICK = ("conv_net", "gpt of one layer", "experts")
MEASURED = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)


@cache
def _split(name: str, mode: Mode) -> tuple[Split, Mesh]:
    make, axes, recipe = CASES[name]
    case, mesh = make(), Mesh(axes, hardware="cpu")
    case.model.to(torch.float32)
    planned = make_plan(PlanRequest(case.model, case.args, case.kwargs, mesh, Options(recipe=recipe)))
    return split_program(planned.graph, mode=mode), mesh


def _program(split: Split, mesh: Mesh, mode: Mode) -> Program:
    fused = mode == "inductor"
    return program_of(
        split.forward, split.backward, mesh, outputs=split.outputs, gradients=split.gradients, fused=fused
    )


def _error(name: str, mode: Mode) -> tuple[float, Timeline]:
    split, mesh = _split(name, mode)
    timeline = simulate(_program(split, mesh, mode))
    measured = measure_step(split, mesh, mode=mode)
    print(f"{name}, {mode}: predicted {timeline.peak_memory}, measured {measured}, {timeline.memory_by_kind}")
    return timeline.peak_memory / measured - 1, timeline


@pytest.mark.slow
@MEASURED
def test_predicted_memory_is_what_an_eager_step_takes(name: str) -> None:
    error, timeline = _error(name, "eager")
    assert abs(error) < LOOSE.get(name, 0.01)
    assert sum(timeline.memory_by_kind.values()) == timeline.peak_memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv_net", "mlp, large batch"])  # the others compile for minutes
def test_predicted_memory_is_what_a_compiled_step_takes(name: str) -> None:
    error, _ = _error(name, "inductor")
    assert abs(error) < 0.1


def test_adam_keeps_two_values_per_parameter_and_a_gradient_as_large() -> None:
    split, mesh = _split("llama, long sequence", "eager")
    state = bytes_by_kind(buffer for buffer in _program(split, mesh, "eager").buffers if buffer.kind in STATE)
    assert state["gradient"] == state["parameter"] and state["optimizer"] == 2 * state["parameter"]
    whole = sum(p.numel() * p.element_size() for p in Llama(layers=1).parameters())
    assert whole <= 8 * state["parameter"] < 1.01 * whole, "an eighth, and the padding of a row"
