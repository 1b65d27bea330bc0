"""A sharded model generates the text that the model of one device does, each rank its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from tests.spawn import run_on_ranks

LENGTH = 4  # tokens that are generated


def _generate(rank: int) -> tuple[list[list[int]], list[list[int]]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    prompts = torch.randint(1, 40, (4, 5))
    how: dict[str, Any] = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "use_cache": False, "do_sample": False}
    how["eos_token_id"] = list(range(20))  # half of all tokens would end a sample, but for the least length
    with torch.no_grad():
        whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded: Any = autoshard(model, mesh, options=Options(recipe="fsdp", compile="eager"))
    part = sharded.shard(prompts)[0]
    with torch.no_grad():
        found = sharded.generate(part, attention_mask=torch.ones_like(part), **how)
    return whole[2 * rank : 2 * rank + 2].tolist(), found.tolist()


@pytest.mark.gloo
def test_each_rank_generates_for_its_samples() -> None:
    for expected, found in run_on_ranks(_generate, 2):
        assert expected == found and {len(sample) for sample in found} == {5 + LENGTH}
