"""A vision transformer written for one device; build it on meta to plan it anywhere.

    python -m autoshard plan examples/vit.py:vit_huge --mesh dp=8,tp=2 --hardware h100 --bf16

Dimensions: "An Image is Worth 16x16 Words", table 1, https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int = 2
    dim: int = 64
    heads: int = 4
    hidden: int = 128  # of the feed-forward
    image: int = 32  # pixels of a side
    patch: int = 8
    classes: int = 16


VIT_LARGE = Config(layers=24, dim=1024, heads=16, hidden=4096, image=224, patch=16, classes=1000)
VIT_HUGE = Config(layers=32, dim=1280, heads=16, hidden=5120, image=224, patch=14, classes=1000)

Case = tuple["ViT", tuple[Tensor, Tensor]]  # a model and the arguments of one training step


def vit_large(batch: int = 256) -> Case:
    return step_of(VIT_LARGE, batch)


def vit_huge(batch: int = 256) -> Case:
    return step_of(VIT_HUGE, batch)


def step_of(config: Config, batch: int) -> Case:
    return ViT(config), (torch.zeros(batch, 3, config.image, config.image), torch.zeros(batch, dtype=torch.long))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(nn.Linear(config.dim, config.hidden), nn.GELU(), nn.Linear(config.hidden, config.dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        mlp: Tensor = self.mlp(self.norm2(x))
        return x + mlp


class ViT(nn.Module):
    """A classifier of images [batch, 3, side, side]: returns logits, or with labels [batch] the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.dim, config.patch, config.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.positions = nn.Parameter(torch.zeros(1, (config.image // config.patch) ** 2 + 1, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits if labels is None else F.cross_entropy(logits, labels)
