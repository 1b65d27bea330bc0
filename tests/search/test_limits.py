"""Memory and time that a search is given: it keeps to them, and says what would do and what was left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import MemoryLimitError, Mesh, Options, ShardingPlan, UserError, plan
from autoshard.planner import candidates
from autoshard.planner.solver_candidate import BEATEN
from autoshard.planner.ties import TIE
from passes.search.solvers import highs
from tests.extended import extended
from tests.models import MLP, ConvNet

Made = tuple[nn.Module, tuple[Any, ...]]


def on_meta(make: Callable[[], Made]) -> Made:
    with torch.device("meta"):
        return make()


def mlp(batch: int, hidden: int) -> Made:
    return MLP((256, hidden, 256)), (torch.empty(batch, 256), torch.empty(batch, 256))


def conv_net() -> Made:
    return ConvNet(16), (torch.empty(64, 3, 24, 24), torch.empty(64, dtype=torch.long))


class Mixture(nn.Module):
    """Experts that all see all rows: the solver estimates a fifth more memory than the simulator finds."""

    def __init__(self, width: int = 1024, hidden: int = 2048, experts: int = 6) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(width, experts), nn.Linear(width, width)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(torch.einsum("bd,edf->ebf", x, self.up))
        mixed = torch.einsum("ebd,be->bd", torch.einsum("ebf,efd->ebd", hidden, self.down), self.gate(x).softmax(-1))
        return nn.functional.mse_loss(self.out(mixed), target)


class MixtureLayer(nn.Module):
    """Attention, and experts that all see all tokens, each with a residual."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, positions, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, positions, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        rows = x.reshape(-1, width)
        hidden = nn.functional.gelu(torch.einsum("td,edf->etf", rows, self.up))
        each = torch.einsum("etf,efd->etd", hidden, self.down)
        return x + torch.einsum("etd,te->td", each, self.gate(rows).softmax(-1)).view(x.shape)


class MixtureDecoder(nn.Module):
    """Two layers of dense mixtures; forward(tokens, labels), each [batch, positions]."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(8000, 512), nn.Linear(512, 8000)
        self.layers = nn.Sequential(*(MixtureLayer(512, 1024, 8) for _ in range(2)))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.tok(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


SMALL: dict[str, tuple[Callable[[], Made], str]] = {
    "wide mlp": (lambda: mlp(64, 4096), "dp=2"),
    "mlp, large batch": (lambda: mlp(4096, 1024), "dp=2,tp=2"),
    "conv net": (conv_net, "tp=2"),
}


def planned(name: str, limit: int | str) -> ShardingPlan:
    make, mesh = SMALL[name]
    model, args = on_meta(make)
    return plan(model, Mesh(mesh, hardware="h100"), args, options=Options(memory_limit=limit))


def named_limit(name: str, limit: int | str) -> int:
    """Return the smallest limit that the error names."""
    with pytest.raises(MemoryLimitError) as raised:
        planned(name, limit)
    found = re.search(r"takes least has a peak of .* \(.*optimizer .*\). Give memory_limit=(\d+),", str(raised.value))
    assert found is not None, raised.value
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SMALL)[1:])])
def test_the_smallest_limit_that_the_error_names_is_enough_and_no_more(name: str) -> None:
    smallest = named_limit(name, "100KB")
    found = planned(name, smallest)
    assert found.cost is not None and smallest * 0.95 <= found.cost.peak_memory <= smallest
    assert named_limit(name, int(smallest * 0.94)) == smallest


def test_a_padding_that_is_proven_to_be_slower_is_searched_no_further() -> None:
    """Ranks pad six experts to eight: HiGHS took half a minute to improve on plans that take a third longer."""
    model, args = on_meta(lambda: (Mixture(), (torch.empty(2048, 1024), torch.empty(2048, 1024))))
    found = plan(model, Mesh("dp=2,tp=2", hardware="h100"), args, options=Options(memory_limit=201_455_756))
    assert found.search is not None and found.search.chosen == "solved" and found.search.bound is not None
    notes = {one.name: one.note for one in found.search.candidates}
    assert notes["solved, padded for dp x tp"] == BEATEN


class Tiny(nn.Module):
    """A plan of it takes a few bytes, of which 5 % is no byte."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sum()


def test_the_smallest_limit_of_a_few_bytes_is_found() -> None:
    model, args = Tiny(), (torch.randn(8),)
    mesh = Mesh("tp=3,dp=2", hardware="cpu")
    peak = plan(model, mesh, args).cost.peak_memory
    with pytest.raises(MemoryLimitError, match=rf"Give memory_limit={int(peak)},"):
        plan(model, mesh, args, options=Options(memory_limit=int(peak) - 1))


def in_time(seconds: float | None) -> ShardingPlan:
    model, args = on_meta(lambda: mlp(1024, 2048))
    return plan(model, Mesh("dp=4,tp=2", hardware="h100"), args, options=Options(time_limit=seconds))


def test_a_limit_is_named_when_the_search_for_the_smallest_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "SECONDS", 0.0)
    with pytest.raises(MemoryLimitError, match="of those found in time, the one that takes least has a peak of") as raised:
        planned("wide mlp", "100KB")
    named = re.search(r"Give memory_limit=(\d+),", str(raised.value))
    assert named is not None
    found = planned("wide mlp", int(named[1]))
    assert found.cost is not None and found.cost.peak_memory <= int(named[1])


def test_a_program_that_takes_too_long_has_no_solution_and_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs, "LONGEST", 0.0)
    program = highs.MixedIntegerProgram()
    program.row([program.column(1.0, integer=True) for _ in range(3)], [3.0, 5.0, 7.0], 4.0, 9.0)
    solved = program.minimise(gap=0.0, time_limit=None)
    assert solved.values is None and solved.bound < 1.0 and not solved.is_infeasible


def test_without_time_the_first_recipe_that_fits_is_the_plan() -> None:
    found = in_time(0.0)
    assert found.search is not None and found.solution is None
    assert found.search.chosen == "fsdp" and found.search.objective is None
    tried = [one for one in found.search.candidates if one.cost is not None]
    assert [one.name for one in tried] == ["fsdp"] and tried[0].fits
    left_out = {one.name: one.note for one in found.search.candidates if one.cost is None}
    assert left_out.keys() >= {"solved", "ddp", "fsdp+megatron"}
    assert set(left_out.values()) == {"the time limit of 0.0 s was over"}


def test_a_short_time_gives_the_best_plan_so_far() -> None:
    found = in_time(0.3)
    assert found.search is not None and found.cost is not None
    fitting = [one.cost.step_time for one in found.search.candidates if one.cost is not None and one.fits]
    assert found.cost.step_time == min(fitting)
    assert found.cost.peak_memory <= found.search.memory_limit
    assert {one.name for one in found.search.candidates} >= {"solved", "ddp", "fsdp+megatron"}


@pytest.mark.slow
def test_a_long_time_gives_the_plan_of_no_limit() -> None:
    limited, free = in_time(600), in_time(None)
    assert limited.search is not None and free.search is not None
    assert not any("time limit" in one.note for one in limited.search.candidates)
    assert limited.layouts == free.layouts and limited.search.objective == free.search.objective


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), True, "10"])
def test_a_time_limit_that_is_no_time_is_refused(limit: Any) -> None:
    with pytest.raises(UserError, match="give seconds, 0 or more, or leave it out for no limit"):
        Options(time_limit=limit)


@pytest.mark.extended
def test_a_plan_is_as_fast_in_its_own_peak_where_the_estimate_is_off_by_little() -> None:
    """The solver estimates 8 % more than the simulator finds, and took a plan that is 4 % slower."""
    model, args = on_meta(lambda: (MixtureDecoder(), (torch.empty(8, 256, dtype=torch.long),) * 2))
    mesh = Mesh("dp=4", hardware="h100")
    free = plan(model, mesh, args).cost
    assert free is not None
    held = plan(model, mesh, args, options=Options(memory_limit=int(free.peak_memory))).cost
    assert held is not None and held.step_time <= free.step_time * (1 + TIE)


@pytest.mark.parametrize(("mesh", "hardware", "experts"), [("dp=2,tp=2", "h100", 6), extended("dp=4", "a100", 8)])
def test_a_plan_that_fits_is_not_lost_where_the_solver_estimates_too_much_memory(
    mesh: str, hardware: str, experts: int
) -> None:
    model, args = on_meta(lambda: (Mixture(experts=experts), (torch.empty(2048, 1024), torch.empty(2048, 1024))))
    steps, peak = list[float](), 0
    for part in (None, 1.05, 1.0, 0.95):
        limit = None if part is None else int(part * peak)
        found = plan(model, Mesh(mesh, hardware=hardware), args, options=Options(memory_limit=limit))
        assert found.cost is not None
        assert limit is None or found.cost.peak_memory <= limit
        peak = peak or found.cost.peak_memory
        steps.append(found.cost.step_time)
    assert max(steps[:3]) <= steps[0] * (1 + TIE)  # the first plan fits in these limits
    assert all(less >= more * (1 - TIE) for more, less in pairwise(steps))
