"""Models of the grid that the examples do not have: a wide MLP, an encoder-decoder, a decoder of unlike layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide_mlp(batch: int, hidden: int = 1 << 17) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return two layers with far more `hidden` columns than the batch has rows."""
    model = nn.Sequential(nn.Linear(8192, hidden), nn.ReLU(), nn.Linear(hidden, 8192))
    return _WithLoss(model), (torch.zeros(batch, 8192), torch.zeros(batch, 8192))


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


def encoder_decoder(batch: int, source: int, target: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return an encoder and a decoder of 24 layers each with the sizes of T5 large, for `[batch, source]` tokens in and
    `[batch, target]` out.
    """
    tokens, labels = torch.zeros(batch, source, dtype=torch.long), torch.zeros(batch, target, dtype=torch.long)
    return EncoderDecoder(layers=24, dim=1024, hidden=4096, heads=16, vocab=32128), (tokens, labels)


class EncoderDecoder(nn.Module):
    """Read tokens in an encoder, and predict labels in a decoder that attends to it."""

    def __init__(self, *, layers: int, dim: int, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(Layer(dim, hidden, heads, crosses=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(dim, hidden, heads, crosses=True) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, source: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(labels)
        for layer in self.encoder:
            memory = layer(memory, None)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, *, causal: bool) -> Tensor:
        made = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in made)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of an encoder or, where it `crosses`, of a decoder."""

    def __init__(self, dim: int, hidden: int, heads: int, *, crosses: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 if crosses else 2))
        self.attention = Attention(dim, heads)
        self.cross = Attention(dim, heads) if crosses else None
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory, causal=False)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def uneven_decoder(batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return twelve layers that are all unlike: each has a wider feed-forward than the one before, up to twelve times."""
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return UnevenDecoder(layers=12, dim=2048, heads=16, vocab=50304), (tokens, tokens)


class UnevenDecoder(nn.Module):
    def __init__(self, *, layers: int, dim: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(UnevenLayer(dim, dim * (number + 1), heads) for number in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class UnevenLayer(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, causal=True)
        return x + self.down(F.gelu(self.up(self.norm2(x))))
