"""The models of published runs, with the kernels that their stacks ran them in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from examples import gpt, llama


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


@torch.library.custom_op("autoshard_published::dropout", mutates_args=())
def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Drop elements in a kernel of its own, which Inductor does not fuse; the mask is a byte an element."""
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    return x * kept / (1 - p), kept


@torch.library.custom_op("autoshard_published::dropout_backward", mutates_args=())
def dropout_backward(gradient: Tensor, kept: Tensor, p: float) -> Tensor:
    return gradient * kept / (1 - p)


dropout.register_fake(lambda x, p: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)))
dropout_backward.register_fake(lambda gradient, kept, p: torch.empty_like(gradient))


def _keep_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.p, ctx.kept = inputs[1], output[1]


dropout.register_autograd(
    lambda ctx, gradient, _: (dropout_backward(gradient, ctx.kept, ctx.p), None), setup_context=_keep_mask
)
autoshard.rule(torch.ops.autoshard_published.dropout.default)("b h q k -> b h q k, b h q k")
autoshard.rule(torch.ops.autoshard_published.dropout_backward.default)("b h q k, b h q k -> b h q k")


class MegatronAttention(gpt.Attention):
    """Attention as in Megatron-LM before FlashAttention: scores in memory, and dropout in a kernel of its own.

    Its softmax masks future positions on the way. A mask does not change what a softmax reads and writes, so none is here.
    """

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        weights, _ = dropout(F.softmax(q @ k.transpose(2, 3), dim=-1), 0.1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class MegatronGPT(gpt.GPT):
    """A GPT as in Megatron-LM of 2021: the loss of logits in float32. The fused dropout of its residual is left out."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.attn = MegatronAttention(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def megatron(config: gpt.Config, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.zeros(batch, config.seq, dtype=torch.long)
    return MegatronGPT(config), (tokens, tokens)
