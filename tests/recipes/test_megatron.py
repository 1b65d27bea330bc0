"""What `megatron` makes of models that are not written as its authors' is: it shards what it knows, and never crashes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, check, plan
from passes.ir.layout import R

DIM, VOCAB, SEQ, BATCH = 16, 32, 8, 4

Embed = Callable[["Embedded", Tensor, Tensor], Tensor]


class Embedded(nn.Module):
    """Tables whose rows are combined by `embed`, before one MLP; positions are an input, as in Hugging Face's models."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.embed = embed
        self.tok, self.pos, self.kind = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM), nn.Embedding(2, DIM)
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(self, tokens, positions)
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


EMBEDDINGS: dict[str, Embed] = {
    "positions on the right": lambda m, t, p: m.tok(t) + m.pos(p),
    "positions on the left": lambda m, t, p: m.pos(p) + m.tok(t),
    "three ways, as in BERT": lambda m, t, p: m.tok(t) + m.kind(t % 2) + m.pos(p),
    "three ways, positions first": lambda m, t, p: m.pos(p) + m.kind(t % 2) + m.tok(t),
    "scaled": lambda m, t, p: m.tok(t) * DIM**0.5 + m.pos(p) * 0.5,
    "scaled from the left": lambda m, t, p: 0.5 * m.pos(p) + DIM**0.5 * m.tok(t),
    "dropped out, then added": lambda m, t, p: m.tok(t) + m.drop(m.pos(p)),
    "normalised, then added": lambda m, t, p: m.tok(t) + m.norm(m.pos(p)),
    "a product": lambda m, t, p: m.tok(t) * m.pos(p),
    "a difference": lambda m, t, p: m.tok(t) - m.pos(p),
    "joined": lambda m, t, p: torch.stack((m.tok(t), m.pos(p).expand(t.shape[0], -1, -1))).sum(0),
    "one position at a time": lambda m, t, p: m.tok(t) + m.pos(p[0]) + m.pos(p)[None],
    "after zeros": lambda m, t, p: torch.zeros(SEQ, DIM) + m.pos(p) + m.tok(t),
    "after sines": lambda m, t, p: torch.sin(torch.arange(SEQ)[:, None] * torch.ones(DIM)) + m.pos(p) + m.tok(t),
    "flat": lambda m, t, p: (torch.zeros(BATCH * SEQ, DIM) + m.tok(t.flatten())).view(BATCH, SEQ, DIM),
    "of its own order": lambda m, t, p: m.tok(t).transpose(0, 1).add(m.pos(p)[:, None]).transpose(0, 1),
}
QUICK = ("positions on the left", "three ways, as in BERT", "scaled", "joined")  # one of each kind, in `make test-fast`


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in EMBEDDINGS]
)
def test_embeddings_are_combined_in_any_way(name: str) -> None:
    torch.manual_seed(0)
    model = Embedded(EMBEDDINGS[name]).double().eval()
    args = torch.randint(VOCAB, (BATCH, SEQ)), torch.arange(SEQ)
    checked = check(model, "tp=2", args, options=Options(recipe="megatron"))
    assert checked, str(checked)
    assert placements(plan(model, Mesh("tp=2"), args=args, options=Options(recipe="megatron")), "tok", "up", "down") == {
        "tok.weight": "S(0)", "up.weight": "S(0)", "down.weight": "S(1)"
    }  # fmt: skip


def placements(made: ShardingPlan, *modules: str) -> dict[str, str]:
    names = [f"{module}.weight" for module in modules]
    return {name: str(made.parameters[name].layout.placements[-1]) for name in names}  # on tp, the last axis


class Grouped(nn.Module):
    """Attention whose q, k and v are one linear, with fewer heads of k and v."""

    def __init__(self, heads: int = 4, groups: int = 2, size: int = 4) -> None:
        super().__init__()
        self.widths, self.size = (heads * size, groups * size, groups * size), size
        self.qkv, self.out = nn.Linear(DIM, sum(self.widths), bias=False), nn.Linear(heads * size, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (-1, self.size)).transpose(1, 2) for p in self.qkv(x).split(self.widths, -1))
        attended = F.scaled_dot_product_attention(q, *(p.repeat_interleave(q.shape[1] // p.shape[1], 1) for p in (k, v)))
        return (x + self.out(attended.transpose(1, 2).flatten(2))).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("dp", ["fsdp", "ddp"])
def test_a_projection_with_parts_of_different_sizes_is_a_fourth_on_each_rank_and_equal(dp: str) -> None:
    torch.manual_seed(0)
    model, args = Grouped().double(), (torch.randn(BATCH, SEQ, DIM, dtype=torch.float64),)
    options = Options(recipe={"dp": dp, "tp": "megatron"})
    made = plan(model, Mesh("dp=2,tp=2", hardware="cpu"), args, options=options)
    ways = [sum(p != R for p in made.parameters[f"{name}.weight"].layout.placements) for name in ("qkv", "out")]
    assert ways == ([2, 2] if dp == "fsdp" else [1, 1])
    found = check(model, "dp=2,tp=2", args, plan=made)
    assert found and found.tolerance <= 1e-9, str(found)


class Scored(nn.Module):
    """A head whose logits are returned beside the loss, as Hugging Face's models return them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.tok(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("outputs", [None, {"1": {"tp": "S(2)"}}, {"1": {"tp": "S(1)", "dp": "S(0)"}}])
def test_a_head_is_vocabulary_parallel_though_its_logits_are_an_output(outputs: dict[str, dict[str, str]] | None) -> None:
    torch.manual_seed(0)
    model, tokens = Scored().double(), torch.randint(VOCAB, (BATCH, SEQ))
    options = Options(recipe="fsdp+megatron", outputs=outputs)
    made = plan(model, Mesh("dp=2,tp=2", hardware="cpu"), (tokens, tokens), options=options)
    assert placements(made, "head") == {"head.weight": "S(0)"}
    assert not [remark for remark in made.remarks if "stays whole" in remark.text]
    found = check(model, "dp=2,tp=2", (tokens, tokens), plan=made)
    assert found and found.tolerance <= 1e-9, str(found)
