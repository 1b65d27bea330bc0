"""Scale the gradient of an input that another program computed, as a GAN's discriminator takes its generator's output.

A program takes the gradient of an output as of a loss that is a mean over ranks (`Options(loss="mean")`), and returns the
gradient of an input as of the loss of the global batch. Between two programs, the one has to be turned into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from passes.errors import UserError

OutputScale = Callable[[Any, int], float | None]
"""Return what a node of the autograd graph multiplies the gradient of its output of this number by; None: no program."""


def gradient_scale(path: str, tensor: torch.Tensor, output_scale: OutputScale) -> float:
    """Return the factor for the gradient of the input `path`: 1 if it goes to leaves, such as an argument of the user.

    Raises UserError if it goes to places that need different factors.
    """
    factors = set(_factors(tensor, output_scale))
    if len(factors) > 1:
        raise UserError(
            f"input {path!r} is computed from an output of a sharded model, which takes gradients as of a mean over ranks, and "
            "from another tensor that does not; detach() one of them, or shard the first model with Options(loss='sum')"
        )
    return factors.pop() if factors else 1.0


def _factors(tensor: torch.Tensor, output_scale: OutputScale) -> Iterator[float]:
    pending = [] if tensor.grad_fn is None else [(tensor.grad_fn, tensor.output_nr)]
    seen = set()
    while pending:
        node, number = pending.pop()
        scale = output_scale(node, number)
        if scale is not None:
            yield 1.0 / scale
        elif node not in seen:
            seen.add(node)
            found = [(one, of) for one, of in node.next_functions if one is not None]
            pending += found
            if not found:
                yield 1.0
