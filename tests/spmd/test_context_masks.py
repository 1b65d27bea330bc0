"""Context parallelism of attention with masks: windows, biases, packed documents, rows that see no key."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Options, RecipeError
from passes.ir.text import parse_graph
from passes.recipes import recipe_named
from passes.recipes.recipe import Site
from tests.models import Case
from tests.spmd.oracle import Reference, compare
from tests.spmd.test_context import EXCHANGE, GATHER, RING, TOLERANCE

SEQ = 16


class Masked(nn.Module):
    """Four heads attend as a mask says that the model makes itself, from positions or from ids of documents."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(12, 72), kind

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(ids)).transpose(1, 2).flatten(2).square().mean()

    def mask(self, ids: Tensor) -> Tensor:
        places = torch.arange(SEQ)
        apart = places[:, None] - places[None, :]
        if self.kind == "window":
            return (apart >= 0) & (apart < 5)
        if self.kind == "bias":
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
            return (-slopes[:, None, None] * apart).masked_fill(apart < 0, -torch.inf)[None]
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return same & (apart >= 0) & (ids >= 0)[:, None, :, None]


@cache
def reference(kind: str) -> Reference:
    torch.manual_seed(0)
    ids = torch.tensor([[0] * 3 + [1] * 9 + [2] * 4, [0] * 10 + [1] * 4 + [-1] * 2])  # padding sees no key
    return Reference.of(Case(Masked(kind).double(), (torch.randn(2, SEQ, 12, dtype=torch.float64), ids), {}))


@pytest.mark.parametrize(
    ("kind", "mesh", "recipe"),
    [
        ("documents", "cp=4", GATHER),
        ("documents", "cp=4", RING),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("documents", "cp=2", EXCHANGE),
                ("documents", "a=2,b=2", RING),
                ("window", "cp=4", GATHER),
                ("window", "cp=4", RING),
                ("window", "cp=2", EXCHANGE),
                ("bias", "cp=4", GATHER),
                ("bias", "cp=4", RING),
                ("bias", "cp=2", EXCHANGE),
            )
        ),
    ],
)
def test_a_masked_step_gives_the_numbers_of_one_device(kind: str, mesh: str, recipe: str) -> None:
    whole = reference(kind)
    ranks = whole.plan(mesh, Options(recipe=recipe))
    plan = ranks.planned.plan
    assert bool(plan.count("send")) == (recipe == RING)
    assert not [remark.text for remark in plan.remarks if "runs whole" in remark.text]
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_a_ring_of_a_kernel_that_takes_a_bias_is_refused() -> None:
    gm, mesh = parse_graph(
        """
        mesh cp=2
        stage CAPTURED
        %q: f32[1, 4, 64, 8] = input("q")
        %bias: f32[1, 1, 64, 64] = input("bias")
        %a: (f32[1, 4, 64, 8], f32[1, 4, 64], i64[], i64[]) = _scaled_dot_product_efficient_attention(%q, %q, %q, %bias, True)
        %out: f32[1, 4, 64, 8] = getitem(%a, 0)
        return output("output") %out
        """
    )
    with pytest.raises(RecipeError) as caught:
        recipe_named(RING).decide(Site(gm, mesh, 0, 1))
    assert str(caught.value) == (
        "recipe 'context(ring)' on axis 'cp': attention cannot be sharded: a ring takes no bias of this kernel, and no kernel "
        "without a logsumexp; use context(gather), or shard inputs by hand, such as Options(inputs={'tokens': {'cp': Shard(1)}})"
    )
