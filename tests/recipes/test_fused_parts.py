"""`megatron` shards each part of a fused query, key and value, also where they have different numbers of heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, check, plan
from passes.ir.layout import Shard

DIM, HEAD, HEADS, KEYS = 32, 8, 4, 2
QUERY, KEY = HEADS * HEAD, KEYS * HEAD
X = torch.randn(4, 6, DIM, dtype=torch.float64)
OPTIONS = Options(recipe="fsdp+megatron")


def split(fused: Tensor) -> tuple[Tensor, ...]:
    return fused.split((QUERY, KEY, KEY), -1)


def sliced(fused: Tensor) -> tuple[Tensor, ...]:
    return fused[..., :QUERY], fused[..., QUERY : QUERY + KEY], fused[..., QUERY + KEY :]


def split_twice(fused: Tensor) -> tuple[Tensor, ...]:
    query, pair = fused.split((QUERY, 2 * KEY), -1)
    return query, *pair.chunk(2, -1)


class Attention(nn.Module):
    """A grouped-query attention whose query, key and value are one linear, and a residual around it."""

    def __init__(self, parts: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.qkv, self.out, self.parts = nn.Linear(DIM, QUERY + 2 * KEY), nn.Linear(QUERY, DIM), parts

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.parts(self.qkv(x)))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [split, sliced, split_twice], ids=lambda parts: parts.__name__)
def test_each_rank_computes_its_heads(parts: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    model = Attention(parts).double()
    report = check(model, "dp=2,tp=2", (X,), options=OPTIONS)
    assert report, report
    made, one = plan(model, "dp=2,tp=2", (X,), options=OPTIONS), plan(model, "dp=1", (X,))
    assert operations(made) < 0.27 * operations(one)  # a quarter, and what joins the parts
    assert made.parameters["qkv.weight"].layout.placements == (Shard(0), Shard(1))


def operations(made: ShardingPlan) -> float:
    assert made.timeline is not None
    return sum(task.flops for task in made.timeline.program.tasks)


def test_a_search_takes_the_better_of_plans_with_split_products_and_without() -> None:
    made = plan(Attention(split), Mesh("dp=2,tp=2", hardware="h100"), (torch.randn(4, 6, DIM),))
    assert made.search is not None
    other = next(one for one in made.search.candidates if "split" in one.name)
    assert made.cost is not None and other.cost is not None and made.cost.step_time <= other.cost.step_time
    assert other.name.endswith(", not split" if made.pads else ", split")
