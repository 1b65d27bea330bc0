"""A message that is joined with no other takes longer than the solver counts: a plan with some is solved again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard import Mesh, Options, plan
from autoshard.planner.ties import TIE


@pytest.mark.extended
def test_a_small_model_of_which_every_rank_computes_all_is_not_made_slower_by_gathers_of_single_parameters() -> None:
    """It took 2.7 times as long, or as many solves as parameters were gathered for nothing."""
    transformers = pytest.importorskip("transformers", reason="the extra [models] has it")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Gemma2Config(vocab_size=64, num_hidden_layers=2, sliding_window=4, **sizes)
    model, tokens = transformers.Gemma2ForCausalLM(config), torch.ones(4, 8, dtype=torch.long)
    batch = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    found, whole = (
        plan(model, Mesh("tp=2"), (), batch, options=Options(recipe=recipe, progress=False)) for recipe in ("auto", None)
    )
    assert found.cost is not None and whole.cost is not None
    assert found.cost.step_time <= whole.cost.step_time * (1 + TIE)


class Tables(nn.Module):
    """Looks up three rows for a sample, the last in a table of few rows, and scores them: x [batch, 3], labels [batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 32) for rows in (100_003, 50_000, 7))
        self.up, self.down = nn.Linear(96, 256), nn.Linear(256, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = torch.cat([table(x[:, number]) for number, table in enumerate(self.tables)], 1)
        return F.binary_cross_entropy_with_logits(self.down(F.relu(self.up(found))).squeeze(1), labels)


@pytest.mark.slow
def test_small_parameters_for_which_kernels_wait_are_stored_whole() -> None:
    """The plan gathered a table of seven rows, at the price of its bytes in a bucket. All messages of the plan were made dearer
    then, also those that all good plans have, and the plan that was taken in the end was 9 % slower."""
    with torch.device("meta"):
        model, args = Tables(), (torch.zeros(5000, 3, dtype=torch.long), torch.zeros(5000))
    found, whole = (
        plan(model, Mesh("dp=7", hardware="h100"), args, options=Options(params=params, progress=False))
        for params in (None, {"*": {"dp": "R"}})
    )
    assert found.cost is not None and whole.cost is not None
    assert found.cost.step_time <= whole.cost.step_time * (1 + TIE)
