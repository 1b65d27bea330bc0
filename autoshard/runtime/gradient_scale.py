"""Scale the gradient of an input that another program computed, as a GAN's discriminator takes its generator's output.

A program takes the gradient of an output as of a loss that is a mean over ranks (`Options(loss="mean")`), and returns the
gradient of an input as of the loss of the global batch. Between two programs, the one has to be turned into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from passes.errors import UserError

OutputScale = Callable[[Any, int], float | None]
"""Return what a node of the autograd graph multiplies the gradient of its output of this number by; None: no program."""


def gradient_scale(path: str, tensor: torch.Tensor, output_scale: OutputScale, checkpoint: Any = None) -> float:
    """Return the factor for the gradient of the input `path`: 1 if it goes to leaves, such as an argument of the user.

    `checkpoint` is the node of a reentrant checkpoint that is computed again now, if there is one: its inputs are leaves
    meanwhile, and their gradients go on to where the node's do. Raises UserError for an input whose gradient goes to places
    that need different factors.
    """
    edge = get_gradient_edge(tensor)
    factors = set(_factors((edge.node, edge.output_nr), output_scale, checkpoint))
    if len(factors) > 1:
        raise UserError(
            f"input {path!r} is computed from an output of a sharded model, which takes gradients as of a mean over ranks, and "
            "from another tensor that does not; detach() one of them, or shard the first model with Options(loss='sum')"
        )
    return factors.pop() if factors else 1.0


def _factors(start: tuple[Any, int], output_scale: OutputScale, checkpoint: Any) -> Iterator[float]:
    pending, seen, leaves = [start], set[Any](), list[Any]()
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
                leaves.append(node)
    inputs = [] if checkpoint is None else [leaf for leaf in leaves if not _is_parameter(leaf)]
    if inputs:
        yield from _factors((checkpoint, 0), output_scale, None)
    if len(leaves) > len(inputs):
        yield 1.0


def _is_parameter(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "variable", None), nn.Parameter)
