"""Say how a sequence is cut for attention, when a search considers to do so, and what it costs not to."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from passes.cost.kernel_time import kernel_flops, kernel_seconds
from passes.hardware.hardware import Hardware
from passes.ir.call import call_of
from passes.ir.graph import results_of
from passes.ir.layout import Shard
from passes.ir.units import format_seconds
from passes.recipes.context_parallel.way_costs import POSITIONS
from passes.rules.attention import is_attention

# Positions from which a search considers to shard them, on every axis: twice the 8,192 of Llama 3's pretraining, which had no
# context parallelism (Llama Team 2024, section 3.4.2). Shorter sequences do not pay for the longer search.
LONG = 16_384

CONTEXT_AXES = ("cp", "context")  # names that torchtitan, Megatron-LM and MaxText give to axes of the sequence


def causal_positions(length: int, ranks: int, dim: int = POSITIONS) -> Shard:
    """Return how a rank has positions of causal attention: a chunk of each half, so that work is equal, if they divide."""
    return Shard(dim, 2, 1) if length % (2 * ranks) == 0 else Shard(dim)


def is_long(nodes: Iterable[Node]) -> bool:
    """Return whether some attention has as many positions as pay for a longer search."""
    return any(is_attention(node.target) and results_of(node)[0].shape[POSITIONS] >= LONG for node in nodes)


def repeated_work(node: Node, ranks: int, hardware: Hardware | None) -> str:
    """Say what it costs that all ranks compute the whole of an attention."""
    call = call_of(node)
    flops = kernel_flops(call)
    taken = "" if hardware is None else f" in {format_seconds(kernel_seconds(call, hardware))}"
    return f"attention runs whole on all {ranks} ranks: each computes {flops:.3g} FLOP{taken}, and as a part {flops / ranks:.3g}"
