"""A message that is joined with no other takes longer than the solver counts: a plan with some is solved again."""

from __future__ import annotations

import pytest
import torch

from autoshard import Mesh, Options, plan
from autoshard.planner.ties import TIE


@pytest.mark.slow
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
