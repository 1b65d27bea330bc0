"""Llama 3 at its public sizes, written for one device; build it on meta to plan it anywhere.

    python -m autoshard plan examples/llama.py:llama3_8b --mesh dp=32,tp=8 --hardware h100 --bf16

Dimensions: "The Llama 3 Herd of Models", table 3, https://arxiv.org/abs/2407.21783.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int  # of the feed-forward
    vocab: int = 128256
    seq: int = 8192  # the longest sequence that positions are made for
    rope_base: float = 500000.0


LLAMA3_8B = Config(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336)
LLAMA3_70B = Config(layers=80, dim=8192, heads=64, kv_heads=8, hidden=28672)
LLAMA3_405B = Config(layers=126, dim=16384, heads=128, kv_heads=8, hidden=53248)
TINY = Config(layers=2, dim=64, heads=8, kv_heads=4, hidden=176, vocab=96, seq=32)


Case = tuple["Llama", tuple[Tensor, Tensor]]  # a model and the arguments of one training step


def llama3_8b(batch: int = 64, seq: int = 8192) -> Case:
    """Return model and arguments. `batch` is global: by default 2 sequences for each of 32 data-parallel ranks."""
    return step_of(LLAMA3_8B, batch, seq)


def llama3_70b(batch: int = 64, seq: int = 8192) -> Case:
    return step_of(LLAMA3_70B, batch, seq)


def llama3_405b(batch: int = 32, seq: int = 8192) -> Case:
    return step_of(LLAMA3_405B, batch, seq)


def tiny(batch: int = 8, seq: int = 16) -> Case:
    """Return two small layers, which are planned in seconds."""
    return step_of(TINY, batch, seq)


def step_of(config: Config, batch: int, seq: int) -> Case:
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return Llama(replace(config, seq=seq)), (tokens, tokens)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, heads, seq, head_dim] rotated, in its dtype; cos and sin are [seq, head_dim], in float32."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A decoder; `forward(tokens, labels)`, both `[batch, seq]`, returns the mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        shape = config.seq, config.dim // config.heads
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Fill parameters and buffers; on meta, call it after `to_empty`."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        seq, head_dim = self.cos.shape
        device = self.cos.device
        frequencies = self.config.rope_base ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
        angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        seq = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:seq], self.sin[:seq])
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), labels.flatten())
