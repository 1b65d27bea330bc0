"""Our decompositions of ops that Inductor leaves whole: into ops that can be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._decomp.decompositions import Reduction
from torch._ops import OpOverload

aten = torch.ops.aten


def draw_categories(weights: Tensor, count: int, replacement: bool = False, *, generator: torch.Generator | None = None) -> Any:
    """Draw as `multinomial` does, by a race of exponential times, as torch's kernel: the first to arrive, or the first
    `count`.

    With replacement, each of the `count` draws is a race of its own.
    """
    if generator is not None:
        return NotImplemented
    if count > 1 and replacement:
        races = weights.unsqueeze(-2).expand(*weights.shape[:-1], count, weights.shape[-1])
        return (races / aten.exponential.default(torch.empty_like(races))).argmax(-1)
    speeds = weights / aten.exponential.default(torch.empty_like(weights))
    return speeds.argmax(-1, keepdim=True) if count == 1 else speeds.topk(count, -1).indices


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Do as `masked_scatter` does: each row that the mask selects is looked up by the number of selected rows before it.

    Multimodal models put the features of an image in place of its tokens so. Their mask repeats a mask of tokens over
    the width of a token, and rows are as wide. A mask that repeats nothing has rows of one element.
    """
    if not source.numel():
        return NotImplemented
    x, mask = aten.broadcast_tensors.default([x, mask])
    rows, width = _rows(mask, source.numel())
    found = aten.embedding.default(source.reshape(-1, width), _places(rows))
    return torch.where(mask, found.reshape(x.shape), x)


def masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Any:
    """Return the gradient of `source`: each row is added where `masked_scatter` looked it up."""
    if not math.prod(sizes):
        return NotImplemented
    gradient, mask = aten.broadcast_tensors.default([gradient, mask])
    rows, width = _rows(mask, math.prod(sizes))
    taken = torch.where(mask, gradient, 0).reshape(*rows.shape, width)
    count = math.prod(sizes) // width
    return aten.embedding_dense_backward.default(taken, _places(rows), count, -1, False).reshape(sizes)


def _rows(mask: Tensor, elements: int) -> tuple[Tensor, int]:
    """Return the mask of rows, of which `mask` repeats each, and how wide they are; `elements` are a number of whole rows."""
    width = 1
    while mask.dim() and mask.stride(-1) == 0 and elements % (width * mask.shape[-1]) == 0:
        width, mask = width * mask.shape[-1], mask.select(-1, 0)
    return mask, width


def _places(rows: Tensor) -> Tensor:
    """Return how many rows are selected before each; of one that is not selected, any number that one may have."""
    return (rows.flatten().cumsum(0) - 1).clamp(min=0).reshape(rows.shape)


def _without_generator(op: OpOverload) -> Callable[..., Any]:
    """Return the decomposition of an overload that takes a generator: `generator=None` is the same as none."""

    def drawn(*args: Any, generator: torch.Generator | None, **kwargs: Any) -> Any:
        return op(*args, **kwargs) if generator is None else NotImplemented

    return drawn


def draw_in_range(x: Tensor, low: int, high: int | None, *, generator: torch.Generator | None = None) -> Any:
    """Draw as `x.random_(low, high)` does."""
    if high is None or generator is not None:
        return NotImplemented
    return aten.randint.low(low, high, x.shape, dtype=x.dtype, device=x.device)


def draw_below(x: Tensor, high: int, *, generator: torch.Generator | None = None) -> Any:
    """Draw as `x.random_(high)` does."""
    return draw_in_range(x, 0, high, generator=generator)


def _also_of_nothing(op: OpOverload) -> Callable[..., Any]:
    """Return torch's decomposition of the gradient of a mean, which divides by the number of elements, also for none of them."""
    rule = decomposition_table[op]

    def gradient_of_mean(gradient: Tensor, x: Tensor, target: Tensor, reduction: int, *constants: float) -> Any:
        return rule(gradient, x, target, reduction if x.numel() else Reduction.SUM.value, *constants)

    return gradient_of_mean


_MEANS = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)

_WITH_GENERATOR = {
    aten.rand.generator: aten.rand.default,
    aten.randn.generator: aten.randn.default,
    aten.randint.generator: aten.randint.default,
    aten.randint.low_generator: aten.randint.low,
    aten.randperm.generator: aten.randperm.default,
    aten.rand_like.generator: aten.rand_like.default,
    aten.randn_like.generator: aten.randn_like.default,
    aten.randint_like.generator: aten.randint_like.default,
    aten.randint_like.low_generator_dtype: aten.randint_like.low_dtype,
}

DECOMPOSITIONS: dict[Any, Any] = {
    **{op: _without_generator(other) for op, other in _WITH_GENERATOR.items()},
    **{op: _also_of_nothing(op) for op in _MEANS},
    getattr(aten.random, "from"): draw_in_range,
    aten.random.to: draw_below,
    aten.multinomial.default: draw_categories,
    aten.masked_scatter.default: masked_scatter,
    aten.masked_scatter_backward.default: masked_scatter_backward,
}
