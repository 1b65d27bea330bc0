"""The search finds what fits in little memory, or soon says that nothing does; it counts all that the forward saves."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard import MemoryLimitError, Mesh, Options
from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import fold
from autoshard.planner.problem import captured_problem
from autoshard.planner.request import PlanRequest
from autoshard.planner.solver_candidate import stated
from autoshard.planner.standings import SearchTask
from passes.search.goal import Goal
from passes.search.model.axis_groups import single_axes
from passes.search.prepared import Prepared
from passes.search.solution import Solution
from passes.search.solvers.highs import MixedIntegerProgram

DIM, HIDDEN, VOCAB, TOKENS = 48, 100, 131, 256


class Mixer(nn.Module):
    """Multi-query attention, a convolution of each channel and a gated MLP, with a tied head; forward(tokens, labels)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.query, self.keys, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 16), nn.Linear(DIM, DIM)
        self.mix = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)
        self.gate, self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        query = self.query(x).unflatten(-1, (6, 8)).transpose(1, 2)
        key, value = self.keys(x)[:, None].expand(-1, 6, -1, -1).chunk(2, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@cache
def mixer() -> Prepared:
    tokens, mesh = torch.zeros(8, TOKENS // 8, dtype=torch.long), Mesh("dp=2,tp=2", hardware="h100")
    problem = captured_problem(PlanRequest(Mixer(), (tokens, tokens), {}, mesh, Options()).checked())
    found = stated(SearchTask(problem, fold(problem), FULL), single_axes(problem.mesh))
    assert found is not None
    return found


def solved(limit: float) -> Solution:
    return list(mixer().solutions(Goal(limit, gap=0.1)))[-1]


def test_a_plan_is_found_where_none_of_the_usual_strategies_fits() -> None:
    free = solved(1e12)
    little = solved(0.3 * free.memory)
    assert little.memory <= 0.3 * free.memory * (1 + 1e-9) and little.objective < 2 * free.objective


def test_what_is_far_too_little_is_refused_without_a_search_of_all_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.2 * solved(1e12).memory

    def no_program(*_: object, **__: object) -> None:
        raise AssertionError("a program was solved")

    monkeypatch.setattr(MixedIntegerProgram, "minimise", no_program)
    with pytest.raises(MemoryLimitError, match="no layouts were found that fit"):
        solved(limit)


def test_a_sum_of_partial_products_is_saved_if_a_view_of_it_is_read() -> None:
    """A backward that makes a linear layer's result again from the partial products would have to keep all of those."""
    transitions, sums = mixer().transitions, 0
    for number, value in enumerate(mixer().factor_graph.values):
        terms = transitions.terms[number]
        partial = np.array([transitions.factor_graph.layout(source).has_partial for source in transitions.sources[number]])
        whole = np.array([not transitions.factor_graph.layout(target).has_partial for target in transitions.targets[number]])
        assert not terms.repeats[partial].any()
        if value.shape == (TOKENS, HIDDEN) and value.node.target is torch.ops.aten.add.Tensor:  # before its view of three dims
            sums += 1
            assert (terms.held[partial][:, whole] == terms.moved[whole]).all() and partial.any()
    assert sums == 2  # of the gate and of the layer beside it
