"""The search's model prices the step that is simulated: fused kernels, what is computed again, contention, tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from autoshard import Mesh, Options, Overlap
from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import fold, in_chunks
from autoshard.planner.problem import captured_problem
from autoshard.planner.recipe_candidates import Experts
from autoshard.planner.request import PlanRequest
from autoshard.planner.solver_candidate import stated
from autoshard.planner.standings import SearchTask
from benchmarks.recipe_costs import estimate
from passes.search.model import strategies
from passes.search.model.axis_groups import single_axes
from passes.search.prepared import Prepared

VOCAB, DIM = 32_000, 2048


class Block(nn.Module):
    """A residual layer whose backward needs the values of a norm and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Six layers between an embedding and a cross-entropy; forward(tokens, labels), each [batch, positions]."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def prepared() -> tuple[SearchTask, Prepared]:
    with torch.device("meta"):
        model, tokens = Decoder(), torch.empty(32, 2048, dtype=torch.int64)
    options = Options(mixed_precision=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    request = PlanRequest(model, (tokens, tokens), {}, Mesh("dp=8", hardware="h100"), options)
    problem = captured_problem(request.checked())
    task = SearchTask(problem, fold(problem), FULL)
    found = stated(task, single_axes(problem.mesh))
    assert found is not None
    return task, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero2", "ddp", "megatron"])
def test_the_model_prices_the_step_that_is_simulated(name: str) -> None:
    task, found = prepared()
    experts = Experts(task.problem, task.folded)
    recipes = dict(experts)[name]
    objective = estimate(experts, recipes, found)
    step = in_chunks(task.problem, task.evaluate(recipes)).cost.step_time
    assert objective == pytest.approx(step, rel=0.05)


@pytest.mark.slow
def test_a_recipe_is_priced_with_its_own_layouts_whatever_the_search_considers(monkeypatch: pytest.MonkeyPatch) -> None:
    task, found = prepared()
    experts = Experts(task.problem, task.folded)
    monkeypatch.setattr(strategies, "ROWS", 1)
    few = stated(replace(task, folded=replace(task.folded, prepared={})), single_axes(task.problem.mesh))
    assert few is not None
    few_strategies, all_strategies = (sum(len(v.strategies) for v in one.factor_graph.variables) for one in (few, found))
    assert few_strategies < all_strategies
    for name in ("megatron", "fsdp"):
        recipes = dict(experts)[name]
        assert estimate(experts, recipes, few) == pytest.approx(estimate(experts, recipes, found))


@pytest.mark.slow
def test_the_model_hears_that_messages_next_to_products_are_sent_in_chunks() -> None:
    """In the forward, where nothing else hides them."""
    task, found = prepared()
    whole = replace(task.problem, options=replace(task.problem.options, overlap=Overlap(split_matmuls=False)))
    other = stated(replace(task, problem=whole), single_axes(whole.mesh))
    assert other is not None
    experts = Experts(task.problem, task.folded)
    recipes = dict(experts)
    in_chunks, apart = ([estimate(experts, recipes[name], one) for name in ("megatron", "zero2")] for one in (found, other))
    assert in_chunks[0] < 0.99 * apart[0] and in_chunks[1] == pytest.approx(apart[1])
