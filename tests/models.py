"""Small models as their authors would write them for one device; none of them knows of a mesh.

`build(name)` gives one with its global example inputs. Sizes are pairwise different where an op does not tie
them, so that a mixed-up dim shows as a wrong shape: batch 8, sequence 16, heads 8 (kv heads 4), vocabulary 96;
whatever a recipe shards divides by 8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, VOCAB = 8, 16, 96


class Case(NamedTuple):
    """A model and the arguments of one call, both on one device and global."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: int) -> Case:
    """Return the case `name` of `MODELS`: parameters, buffers and floating inputs in `dtype`, the same for the same seed.

    `sizes` are of a model that has some, such as layers=1 of a decoder.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        case = MODELS[name](**sizes)
        case.model.to(dtype)
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, _cast(dtype), (case.args, case.kwargs))
    return Case(case.model, args, kwargs)


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _tokens(batch: int = BATCH, seq: int = SEQ, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (batch, seq))


# --- GPT: LayerNorm, GELU, biases, learned positions, fused qkv, tied head


class GPTAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).split(self.dim, dim=2)
        q = q.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)
        k = k.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)
        v = v.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, seq, dim))


class GPTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = GPTAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """`forward(tokens, labels)` gives the mean loss; `returns` asks for the logits, or for a dict of both."""

    def __init__(
        self,
        *,
        layers: int = 2,
        dim: int = 80,
        heads: int = 8,
        vocab: int = VOCAB,
        seq: int = SEQ,
        dropout: float = 0.0,
        returns: Literal["loss", "logits", "dict"] = "loss",
    ) -> None:
        super().__init__()
        self.returns = returns
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(seq, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tok.weight
        _init(self)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.drop(self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.returns == "logits":
            return logits
        assert labels is not None
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return {"loss": loss, "logits": logits} if self.returns == "dict" else loss


def gpt(**options: Any) -> Case:
    return Case(GPT(**options), (_tokens(), _tokens()), {})


def gpt_ignored_labels() -> Case:
    """Spread labels that do not count unevenly over the batch, so a mean of means is wrong."""
    labels = _tokens().masked_fill(torch.rand(BATCH, SEQ) < torch.linspace(0, 0.9, BATCH)[:, None], -100)
    return Case(GPT(), (_tokens(), labels), {})


# --- Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, untied head


class RMSNorm(nn.Module):
    """RMSNorm as model code writes it out, rather than as `F.rms_norm`."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class FunctionalRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to `[batch, heads, seq, head_dim]`, the two halves of head_dim as a pair."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, grouping: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.grouping = heads, kv_heads, head_dim, grouping
        self.wq = nn.Linear(dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, seq, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = self.heads // self.kv_heads
        if self.grouping == "enable_gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.grouping == "repeat_interleave":
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        else:
            k, v = (t[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for t in (k, v))
        if self.grouping != "by_hand":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
        return torch.softmax(scores + mask, dim=-1) @ v


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, attention: LlamaAttention, feed_forward: SwiGLU, norm: type[RMSNorm], dim: int) -> None:
        super().__init__()
        self.attention_norm = norm(dim)
        self.attention = attention
        self.ffn_norm = norm(dim)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """`forward(tokens, labels)` gives the mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int = 2,
        dim: int = 64,
        heads: int = 8,
        kv_heads: int = 4,
        head_dim: int = 10,
        hidden: int = 176,
        vocab: int = VOCAB,
        seq: int = SEQ,
        grouping: Literal["repeat_interleave", "expand", "enable_gqa", "by_hand"] = "repeat_interleave",
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            LlamaBlock(LlamaAttention(dim, heads, kv_heads, head_dim, grouping), SwiGLU(dim, hidden), norm, dim)
            for _ in range(layers)
        )
        self.norm = norm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        frequencies = 10000 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        _init(self)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        seq = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:seq], self.sin[:seq])
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def llama(**options: Any) -> Case:
    return Case(Llama(**options), (_tokens(), _tokens()), {})


# --- beyond the decoders


class MLP(nn.Module):
    """`forward(x, y)` gives the mean squared error."""

    def __init__(self, sizes: tuple[int, ...] = (24, 64, 48, 16), bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n, bias=bias) for m, n in itertools.pairwise(sizes))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return F.mse_loss(self.layers[-1](x), y)


def mlp(sizes: tuple[int, ...] = (24, 64, 48, 16), batch: int = 32, bias: bool = True) -> Case:
    return Case(MLP(sizes, bias), (torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])), {})


class ConvNet(nn.Module):
    """Convolutions and a batch norm, whose running statistics are buffers that the forward writes."""

    def __init__(self, channels: int = 16, classes: int = 24) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.fc = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.conv2(x))
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)


def conv_net() -> Case:
    return Case(ConvNet(), (torch.randn(BATCH, 3, 12, 12), torch.randint(24, (BATCH,))), {})


class EncoderBlock(nn.Module):
    """A post-norm transformer block with separate q, k and v; a bias of k has no gradient, so there is none."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=1e-12)
        self.intermediate = nn.Linear(dim, hidden)
        self.output = nn.Linear(hidden, dim)
        self.output_norm = nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.attention_norm(x + self.dense(attended.transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class Encoder(nn.Module):
    """A BERT: token, position and segment embeddings, a padding mask, a masked-token loss."""

    positions: Tensor

    def __init__(self, layers: int = 2, dim: int = 80, heads: int = 8, hidden: int = 192) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.position = nn.Embedding(SEQ, dim)
        self.segment = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(EncoderBlock(dim, heads, hidden) for _ in range(layers))
        self.decoder = nn.Linear(dim, VOCAB)
        self.register_buffer("positions", torch.arange(SEQ)[None], persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.word(input_ids) + self.position(self.positions) + self.segment(segments))
        mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.decoder(x).view(-1, VOCAB), labels.view(-1), ignore_index=-100)


def encoder(layers: int = 2) -> Case:
    lengths = torch.randint(SEQ // 2, SEQ + 1, (BATCH, 1))
    mask = (torch.arange(SEQ) < lengths).long()
    tokens = torch.randint(1, VOCAB, (BATCH, SEQ)) * mask
    masked = (torch.rand(BATCH, SEQ) < 0.3) & mask.bool()
    return Case(Encoder(layers), (tokens, mask, torch.randint(2, (BATCH, SEQ)), tokens.masked_fill(~masked, -100)), {})


class MixtureOfExperts(nn.Module):
    """Every expert sees every token; those that the router did not choose are weighted by zero."""

    def __init__(self, dim: int = 64, hidden: int = 40, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        normed = self.norm(x)
        scores = torch.softmax(self.router(normed), dim=-1)
        top, index = scores.topk(self.chosen, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(-1, index, top)
        hidden = F.silu(torch.einsum("bsd,edh->besh", normed, self.up))
        out = torch.einsum("besh,ehd,bse->bsd", hidden, self.down, weights)
        balance = scores.mean((0, 1)).pow(2).sum()
        return F.mse_loss(x + out, y) + 0.01 * balance


def moe() -> Case:
    return Case(MixtureOfExperts(), (torch.randn(BATCH, SEQ, 64), torch.randn(BATCH, SEQ, 64)), {})


class Irregular(nn.Module):
    """Parameters that are frozen, unused, or shared by two modules, and a buffer that counts calls."""

    calls: Tensor

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.frozen = nn.Linear(24, dim)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(dim, 40)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.second(torch.tanh(self.first(self.frozen(x))))
        return F.l1_loss(x, y)


def irregular() -> Case:
    return Case(Irregular(), (torch.randn(BATCH, 24), torch.randn(BATCH, 64)), {})


class Structured(nn.Module):
    """Inputs in a dict and a tuple, keywords, a number; outputs in a dict."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(24, dim)
        self.scale = nn.Linear(dim, 16)

    def forward(
        self, batch: Mapping[str, Any], *, labels: Tensor, temperature: float = 1.0, extra: Tensor | None = None
    ) -> dict[str, Any]:
        left, right = batch["pair"]
        x = (torch.relu(self.linear(left)) - torch.tanh(self.linear(right))) * batch["weight"][:, None]
        if extra is not None:
            x = x + extra
        logits = self.scale(x) / temperature
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "parts": (x.detach(), None)}


def structured() -> Case:
    batch = {"pair": (torch.randn(BATCH, 24), torch.randn(BATCH, 24)), "weight": torch.rand(BATCH)}
    return Case(Structured(), (batch,), {"labels": torch.randint(16, (BATCH,)), "temperature": 0.5})


MODELS: dict[str, Callable[..., Case]] = {
    "gpt": gpt,
    "gpt_logits": lambda: gpt(returns="logits"),
    "gpt_dict": lambda: gpt(returns="dict"),
    "gpt_dropout": lambda **sizes: gpt(dropout=0.1, **sizes),
    "gpt_ignored_labels": gpt_ignored_labels,
    "llama": llama,
    "llama_rms_norm": lambda: llama(norm=FunctionalRMSNorm),
    "llama_expand": lambda: llama(grouping="expand"),
    "llama_gqa": lambda **sizes: llama(grouping="enable_gqa", **sizes),
    "llama_by_hand": lambda: llama(grouping="by_hand"),
    "mlp": mlp,
    "mlp_uneven": lambda: mlp(sizes=(24, 50, 38, 16)),
    "conv_net": conv_net,
    "encoder": encoder,
    "moe": moe,
    "irregular": irregular,
    "structured": structured,
}


def _init(model: nn.Module) -> None:
    """Make weights so wide, and norms and biases so uneven, that every gradient counts in a comparison."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
