"""Evaluation, and programs whose ends are unlike those of a training step: each gets a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes.rules  # registers the rules
from autoshard import Mesh, Options, plan
from examples.gpt import GPT, Config
from passes.ir.mesh import Mesh as PassMesh
from passes.ir.text import parse_graph
from passes.search.goal import Goal
from passes.search.prepared import best_solution

assert passes.rules

HEAD = "mesh tp=2\nstage CAPTURED\n"
WEIGHT = '%w: f32[64, 32] = parameter("w")\n'
INPUT = '%x: f32[16, 64] = input("x")\n'
GRAPHS = {
    "a loss of parameters": WEIGHT + '%sum_1: f32[] = sum(%w)\nreturn output("output") %sum_1\n',
    "a loss": WEIGHT + INPUT + '%mm: f32[16, 32] = mm(%x, %w)\n%sum_1: f32[] = sum(%mm)\nreturn output("output") %sum_1\n',
    "nothing is read": WEIGHT + INPUT + '%full: f32[8] = full([8], 1)\nreturn output("output") %full\n',
    "no inputs, no parameters": '%full: f32[8] = full([8], 1)\n%sum_1: f32[] = sum(%full)\nreturn output("output") %sum_1\n',
    "an output that is an input": WEIGHT + INPUT + 'return output("output") %x\n',
    "an output that is a parameter": WEIGHT + INPUT + 'return output("output") %w\n',
    "an output that nobody needs": INPUT + '%relu: f32[16, 64] = relu(%x)\nreturn output("output") %x\n',
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_without_a_backward_has_a_plan(name: str) -> None:
    gm, mesh = parse_graph(HEAD + GRAPHS[name])
    solution = best_solution(gm, PassMesh(mesh.names, mesh.sizes, hardware="h100"), Goal())
    assert set(solution.outputs) == {"output"}
    assert {node.name for node in gm.graph.nodes if node.op != "output"} == set(solution.nodes) | {
        node.name for node in gm.graph.nodes if node.op == "placeholder"
    }
    assert solution.bound <= solution.objective


def test_a_parameter_is_not_counted_again_where_a_loss_is_returned() -> None:
    """All that is stored of one parameter are the parameter, its gradient and two moments, on two ranks."""
    gm, mesh = parse_graph(HEAD + GRAPHS["a loss of parameters"])
    solution = best_solution(gm, PassMesh(mesh.names, mesh.sizes, hardware="h100"), Goal())
    nbytes = 64 * 32 * 4
    assert 4 * nbytes / 2 <= solution.memory < 4 * nbytes + 2 * nbytes


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Perceptron()

    def forward(self, x: Tensor, labels: Tensor, unread: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.body(x), labels)


class Unused(Classifier):
    """A module that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(7, 5)


class Frozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.body.up.requires_grad_(False)


class Loss(nn.Module):
    """No parameters."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels)


class Several(Classifier):
    """Numbers, an input and a parameter as they are."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        made = self.body(x)
        return made.sum(), made, made.mean(), x, self.body.down.bias


X, LABELS = torch.zeros(64, 32), torch.zeros(64, dtype=torch.long)
TOKENS = torch.zeros(8, 16, dtype=torch.long)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "mlp": (Perceptron, (X,)),
    "classifier": (Classifier, (X, LABELS)),
    "unused": (Unused, (X, LABELS, torch.zeros(8))),
    "frozen": (Frozen, (X, LABELS)),
    "no parameters": (Loss, (X, LABELS)),
    "one linear": (lambda: nn.Linear(32, 64), (X,)),
    "several outputs": (Several, (X,)),
    "gpt's loss": (lambda: GPT(Config(layers=2, seq=16)), (TOKENS, TOKENS)),
    "gpt's logits": (lambda: GPT(Config(layers=2, seq=16)), (TOKENS,)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("gpt")) for name in MODELS]
)
def test_evaluation_with_default_options_has_a_plan(name: str) -> None:
    make, args = MODELS[name]
    with torch.no_grad():
        found = plan(make(), Mesh("dp=2,tp=2", hardware="h100"), args, options=Options(hardware="h100"))
    assert str(found)


@pytest.mark.slow
def test_frozen_and_unused_parameters_have_a_plan_in_training() -> None:
    for name in ("frozen", "unused", "no parameters"):
        make, args = MODELS[name]
        assert str(plan(make(), Mesh("dp=2,tp=2", hardware="h100"), args, options=Options(hardware="h100")))
