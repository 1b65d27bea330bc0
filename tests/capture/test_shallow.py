"""What is traced of a call without its repeated layers is what folding the whole joint graph gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import Mesh, Options
from autoshard.planner.evaluation import Folded, fold
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import structure
from tests.extended import extended

DEPTH = 16  # two kinds of layers in turn leave enough to fold


class Block(nn.Module):
    """A residual layer with what the name says besides."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.kind, self.index = kind, index
        self.norm = nn.BatchNorm1d(8) if kind == "buffers" else nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shared: nn.Linear) -> torch.Tensor:
        h = self.norm(x) * scale
        h = F.gelu(self.up(h)) if self.kind != "alternating" or self.index % 2 else F.relu(self.up(h))
        if self.kind == "dropout":
            h = F.dropout(h, 0.1)
        if self.kind == "in place":
            h.mul_(2.0)
        if self.kind == "cached":  # an empty cache, as in transformers
            h = torch.cat([torch.tensor([]), h], dim=-2)
        if self.kind == "literal":
            h = h / torch.sqrt(torch.tensor(h.size(-1), dtype=torch.float))
        h = self.down(h)
        return x + (shared(h) if self.kind == "shared" else h)


class Stack(nn.Module):
    """A list of blocks, with a head."""

    scale: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind, index) for index in range(DEPTH))
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.ones(20))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.kind == "embedded":
            x = self.shared(x)
        kept = []
        for block in self.blocks:
            x = block(x, self.scale[:8], self.shared)
            kept.append(x)
        if self.kind == "skip":
            x = x + kept[4]
        loss = F.cross_entropy(self.head(x), y)
        return (loss, kept) if self.kind == "states" else loss


KINDS = (
    *("plain", "embedded", "alternating", "dropout", "buffers", "shared", "in place", "skip", "states", "cached"),
    "literal",
)


def problem_of(kind: str, **options: Any) -> Problem:
    args = torch.randn(12, 8), torch.randint(5, (12,))
    mesh = Mesh("dp=2,tp=2", hardware="h100")
    return captured_problem(PlanRequest(Stack(kind), args, {}, mesh, Options(**options)))


def both(problem: Problem) -> tuple[Folded, bool, Folded]:
    """Return the graph folded as for a plan alone, whether that took the whole graph, and folded as for a program."""
    short = fold(problem)
    return short, "_whole" in vars(problem.captured), fold(problem, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind in ("alternating", "shared") else extended(kind) for kind in KINDS])
def test_a_shallow_trace_is_the_folded_joint_graph(kind: str) -> None:
    short, is_whole, whole = both(problem_of(kind))
    assert structure(short.text) == structure(whole.text)
    assert short.repeats.runs == whole.repeats.runs
    assert short.repeats.parameters == whole.repeats.parameters
    counts = [sorted(folded.repeats.nodes.values()) for folded in (short, whole)]
    assert counts[0] == counts[1]
    assert is_whole == (not short.repeats.runs)
    assert bool(short.repeats.runs) == (kind not in ("shared", "states"))


@pytest.mark.slow
def test_a_layer_that_options_single_out_is_no_copy_of_the_others() -> None:
    pinned = fold(problem_of("plain", params={"blocks.4.up.weight": {"tp": Shard(0)}}))
    assert all(4 not in run.removed for run in pinned.repeats.runs)
    assert any(4 in run.removed for run in fold(problem_of("plain")).repeats.runs)
