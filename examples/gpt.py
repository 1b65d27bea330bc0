"""A GPT written for one device: nothing in this file knows about a mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int = 4
    dim: int = 128
    heads: int = 4
    vocab: int = 256
    seq: int = 128


# 124M parameters; the vocabulary of 50,257 padded to a multiple of 64, as is usual.
GPT2 = Config(layers=12, dim=768, heads=12, vocab=50304, seq=1024)


def gpt2(batch: int = 64, seq: int = 1024) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return GPT-2 and the arguments of one training step, for `python -m autoshard plan examples/gpt.py:gpt2 ...`."""
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return GPT(replace(GPT2, seq=seq)), (tokens, tokens)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with learned positions and a head tied to the token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab, config.dim)
        self.pos = nn.Embedding(config.seq, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.head.weight = self.tok.weight
        self.init_weights()

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                into_residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of `labels` [batch, seq], or without labels the logits of the next token [batch, vocab]."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if labels is None:
            return self.head(x[:, -1])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
