"""Decoders as they are written elsewhere: other attentions, blocks and losses than the zoo's, in small.

`DECODERS[name]()` gives one in float64; seed the generator first. Batch 4, sequence 8, dim 24, 4 heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Case

BATCH, SEQ, DIM, VOCAB = 4, 8, 24, 32


class Attention(nn.Module):
    """Separate projections; subclasses say how the heads attend."""

    def __init__(self, heads: int = 4, kv_heads: int | None = None, head_dim: int = 6, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, head_dim
        self.q = nn.Linear(DIM, heads * head_dim, bias=bias)
        self.k = nn.Linear(DIM, self.kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(DIM, self.kv_heads * head_dim, bias=bias)
        self.o = nn.Linear(heads * head_dim, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for linear, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class NormedAttention(Attention):
    """Queries and keys are normed per head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.q_norm(q), self.k_norm(k), v)


class EinsumAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.head_dim**-0.5
        future = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
        return torch.einsum("bhqk,bhkd->bhqd", (scores + future).softmax(-1), v)


class AlibiAttention(Attention):
    """A bias per head and distance, from a buffer (Press et al. 2022)."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, self.heads + 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        bias = -(place[:, None] - place).abs() * self.slopes[:, None, None].to(q.dtype)
        bias = bias.masked_fill(place[:, None] < place, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class WindowAttention(Attention):
    """The last three tokens, by a mask in a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        place = torch.arange(4 * SEQ)
        self.register_buffer("mask", (place[:, None] >= place) & (place[:, None] - place < 3))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:seq, :seq])


class RelativeAttention(Attention):
    """A learned bias per distance, looked up in a table (T5)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(9, self.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        bias = self.bias((place[:, None] - place).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        return (q @ k.transpose(-1, -2) * self.head_dim**-0.5 + bias).softmax(-1) @ v


class ComplexRotaryAttention(Attention):
    """Rotary embedding as a product of complex numbers (Meta's Llama)."""

    def __init__(self) -> None:
        super().__init__()
        half = self.head_dim // 2
        angles = torch.outer(torch.arange(SEQ), 100 ** (-torch.arange(half) / half)).double()
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.turn(q), self.turn(k), v)

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns).flatten(-2)


class FusedAttention(nn.Module):
    """One projection for q, k and v; `split` says how their columns lie in it."""

    def __init__(self, split: str, kv_heads: int = 4) -> None:
        super().__init__()
        self.split, self.kv_heads = split, kv_heads
        self.qkv = nn.Linear(DIM, DIM + 2 * kv_heads * 6)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        fused = self.qkv(x)
        if self.split == "q then k then v":
            q, k, v = fused.split([DIM, self.kv_heads * 6, self.kv_heads * 6], -1)
            q, k, v = (t.view(batch, seq, -1, 6).transpose(1, 2) for t in (q, k, v))
        elif self.split == "by head":
            q, k, v = (t.transpose(1, 2) for t in fused.view(batch, seq, 4, 3, 6).unbind(3))
        else:
            q, k, v = fused.view(batch, seq, 3, 4, 6).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != 4)
        return self.o(attended.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values from a low-rank latent, one rotary part shared by all heads (DeepSeek)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_norm = nn.Linear(DIM, 10, bias=False), nn.RMSNorm(10)
        self.q_up = nn.Linear(10, DIM, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(DIM, 8 + 2, bias=False), nn.RMSNorm(8)
        self.kv_up = nn.Linear(8, 4 * (4 + 6), bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, seq, 4, 6).transpose(1, 2)
        latent, shared = self.kv_down(x).split([8, 2], -1)
        own, v = self.kv_up(self.kv_norm(latent)).view(batch, seq, 4, 10).transpose(1, 2).split([4, 6], -1)
        k = torch.cat([own, shared[:, None].expand(batch, 4, seq, 2)], -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm; `order` has others: "post" norms the sum, "parallel" gives both branches the same input (GPT-J)."""

    def __init__(self, attention: nn.Module, hidden: int = 40, order: str = "pre", gated: bool = False) -> None:
        super().__init__()
        self.attention, self.order, self.gated = attention, order, gated
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * hidden if gated else hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "post":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        if self.order == "parallel":
            normed = self.norm1(x)
            return x + self.attention(normed) + self.mlp(normed)
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, blocks: list[nn.Module], loss: Callable[[Tensor, Tensor], Any], vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), labels)


def flat_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return flat_loss(logits, labels) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def gathered_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def loss_and_accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"loss": flat_loss(logits, labels), "hits": (logits.argmax(-1) == labels).double().mean()}


def soft_capped_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return flat_loss(30 * torch.tanh(logits / 30), labels)


def decoder(
    attention: Callable[[], nn.Module] = Attention,
    loss: Callable[[Tensor, Tensor], Any] = flat_loss,
    *,
    layers: int = 2,
    batch: int = BATCH,
    seq: int = SEQ,
    vocab: int = VOCAB,
    **block: Any,
) -> Case:
    """Return two blocks of `attention`; `block` is given to each `Block`."""
    model = Decoder([Block(attention(), **block) for _ in range(layers)], loss, vocab)
    # `Module.double` would make complex buffers real.
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    tokens = (torch.randint(vocab, (batch, seq)) for _ in range(2))
    return Case(model, tuple(tokens), {})


def block_used_thrice() -> Case:
    case = decoder(layers=1)
    blocks = case.model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    blocks.extend(2 * [blocks[0]])
    return case


LOSSES = (shifted_loss, smoothed_loss, z_loss, summed_loss, token_losses, gathered_loss, loss_and_accuracy)

DECODERS: dict[str, Callable[[], Case]] = {
    "qk_norm": lambda: decoder(NormedAttention),
    "einsum": lambda: decoder(EinsumAttention),
    "alibi": lambda: decoder(AlibiAttention),
    "window": lambda: decoder(WindowAttention),
    "relative": lambda: decoder(RelativeAttention),
    "complex_rotary": lambda: decoder(ComplexRotaryAttention),
    "latent": lambda: decoder(LatentAttention),
    "one_kv_head": lambda: decoder(lambda: Attention(kv_heads=1)),
    "fewer_kv_heads_than_ranks": lambda: decoder(lambda: Attention(kv_heads=2, bias=True)),
    "heads_do_not_divide": lambda: decoder(lambda: Attention(heads=3, head_dim=8)),
    "odd_head_dim": lambda: decoder(lambda: Attention(head_dim=5)),
    "fused_by_head": lambda: decoder(lambda: FusedAttention("by head")),
    "fused_by_part": lambda: decoder(lambda: FusedAttention("by part")),
    "fused_grouped": lambda: decoder(lambda: FusedAttention("q then k then v", kv_heads=2)),
    "parallel": lambda: decoder(order="parallel"),
    "post_norm": lambda: decoder(order="post"),
    "gate_and_up_in_one": lambda: decoder(gated=True),
    "hidden_does_not_divide": lambda: decoder(hidden=27),
    "hidden_divides_by_two": lambda: decoder(hidden=30),
    "sequence_does_not_divide": lambda: decoder(seq=7),
    "vocabulary_does_not_divide": lambda: decoder(vocab=33),
    "batch_is_sequence": lambda: decoder(batch=8, seq=8),
    "batch_is_sequence_is_heads": lambda: decoder(batch=4, seq=4),
    "vocabulary_is_dim": lambda: decoder(vocab=DIM),
    "block_used_thrice": block_used_thrice,
    "soft_capped_loss": lambda: decoder(loss=soft_capped_loss, layers=1),
    **{loss.__name__: partial(decoder, loss=loss, layers=1) for loss in LOSSES},
}
