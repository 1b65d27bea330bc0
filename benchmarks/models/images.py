"""Image models of timm, which is no part of the extra `models`: its torchvision has to match torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.case import Case

CLASSES = 10


class Classifier(nn.Module):
    """A model of timm, which returns logits, with its loss."""

    def __init__(self, name: str, **sizes: Any) -> None:
        super().__init__()
        self.model = import_module("timm").create_model(name, num_classes=CLASSES, **sizes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def _images(batch: int, length: int) -> dict[str, Any]:
    return {"images": torch.randn(batch, 3, 32, 32), "labels": torch.randint(CLASSES, (batch,))}


def _of(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return partial(Classifier, name, **sizes)


_VIT = _of("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, embed_dim=64, num_heads=4)
_SWIN = _of("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4))
_CONVNEXT = _of("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 32, 64))

_case = partial(Case, inputs=_images, package="timm")

CASES = (
    _case("timm ViT", _VIT),
    _case("timm Swin", _SWIN),
    _case("timm ConvNeXt", _CONVNEXT, is_transformer=False),
    _case("timm ResNet", _of("resnet18"), is_transformer=False),
)
