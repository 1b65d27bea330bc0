"""Modes of torch that change what a call computes, as far as no public function tells."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def in_transform() -> bool:
    """Return whether a transform of `torch.func` is active: vmap, grad, jvp, or what is made of them."""
    return torch._C._functorch.maybe_current_level() is not None


def in_forward_mode() -> bool:
    """Return whether forward-mode automatic differentiation is active."""
    return forward_ad._current_level >= 0
