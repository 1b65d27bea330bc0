"""Say how a sequence is cut for attention, when a search considers to do so, and what it costs not to."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from passes.cost.kernel_time import kernel_flops
from passes.ir.graph import results_of
from passes.recipes.context_parallel.way_costs import POSITIONS
from passes.rules.attention import is_attention
from passes.rules.rule import call_of

# Blocks of a sequence for causal attention, of each of which a rank has a part. Of the pairs of a query and a key that are
# needed, `passes/rules/local_forms/causal.py` then computes up to 1.25 times as many, in 11 calls of the kernel; with 8
# blocks 1.125 times, in 23 calls.
BLOCKS = 4

# Positions from which a search considers to shard them, on every axis: twice the 8,192 of Llama 3's pretraining, which had no
# context parallelism (Llama Team 2024, section 3.4.2). Shorter sequences do not pay for the longer search.
LONG = 16_384

CONTEXT_AXES = ("cp", "context")  # names that torchtitan, Megatron-LM and MaxText give to axes of the sequence


def blocks_of(length: int, ranks: int) -> int:
    """Return into how many blocks a sequence of causal attention is cut: fewer where `ranks` do not divide them."""
    outer = BLOCKS
    while length % (outer * ranks) and outer > 1:
        outer //= 2
    return outer


def is_long(nodes: Iterable[Node]) -> bool:
    """Return whether some attention has as many positions as pay for a longer search."""
    return any(is_attention(node.target) and results_of(node)[0].shape[POSITIONS] >= LONG for node in nodes)


def repeated_work(node: Node, ranks: int) -> str:
    """Say what it costs that all ranks compute the whole of an attention."""
    flops = kernel_flops(call_of(node))
    each = f"each computes {flops:.3g} FLOP, and as a part {flops / ranks:.3g}"
    return f"attention runs whole on all {ranks} ranks: {each}"
