"""The models of published runs, with the kernels that their stacks ran them in."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published_kernels import add_bias, drop_and_add, dropout, norm
from examples import gpt, llama

P = 0.1  # of dropout


class TitanAttention(llama.Attention):
    """Attention as in torchtitan: rotated as complex numbers, which Inductor generates no code for, keys and values repeated."""

    def __init__(self, config: llama.Config) -> None:
        super().__init__(config)
        self.groups = config.heads // config.kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        turns = torch.complex(cos, sin)[:, None, : self.head_dim // 2]
        q, k = _turned(q, turns), _turned(k, turns)
        k, v = (t[:, :, :, None].expand(-1, -1, -1, self.groups, -1).flatten(2, 3) for t in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class TitanLlama(llama.Llama):
    """A Llama as in torchtitan: the loss of logits in float32."""

    def __init__(self, config: llama.Config) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.attention = TitanAttention(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def titan(config: llama.Config, batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return TitanLlama(replace(config, seq=seq)), (tokens, tokens)


class MegatronAttention(gpt.Attention):
    """Attention as in Megatron-LM before FlashAttention: scores in memory, and dropout in a kernel of its own.

    Values are [positions, sequences, dims], so that heads are multiplied where they are. Its softmax masks future positions
    on the way. A mask does not change what a softmax reads and writes, so none is here.
    """

    def forward(self, x: Tensor) -> Tensor:
        made = zip(F.linear(x, self.qkv.weight).chunk(3, dim=-1), self.qkv.bias.chunk(3), strict=True)
        q, k, v = (add_bias(*one).unflatten(-1, (-1, self.head_dim)).flatten(1, 2).transpose(0, 1) for one in made)
        weights, _ = dropout(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), P)
        heads = torch.bmm(weights, v).transpose(0, 1).unflatten(1, (x.shape[1], -1))
        return F.linear(heads.flatten(2), self.proj.weight)


class MegatronNorm(nn.LayerNorm):
    """A norm with kernels of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias)


class MegatronBlock(gpt.Block):
    """A layer as in Megatron-LM of 2021, with the kernels of `published_kernels`."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__(config)
        self.norm1, self.attn, self.norm2 = MegatronNorm(config.dim), MegatronAttention(config), MegatronNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = drop_and_add(self.attn(self.norm1(x)), self.attn.proj.bias, x, P)
        made = F.linear(F.gelu(self.mlp.up(self.norm2(x))), self.mlp.down.weight)
        return drop_and_add(made, self.mlp.down.bias, x, P)[0]


class MegatronGPT(gpt.GPT):
    """A GPT as in Megatron-LM of 2021: the loss of logits in float32."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(MegatronBlock(config) for _ in range(config.layers))
        self.norm = MegatronNorm(config.dim)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = (self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.t().flatten())


def megatron(config: gpt.Config, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.zeros(batch, config.seq, dtype=torch.long)
    return MegatronGPT(config), (tokens, tokens)
