"""Context parallelism: the sequence is sharded, and attention gathers keys, passes them around, or exchanges heads."""

from __future__ import annotations

from passes.recipes.context_parallel.long_sequences import CONTEXT_AXES, causal_positions, is_long, repeated_work
from passes.recipes.context_parallel.sequences import CONTEXT, CONTEXT_WAYS, FSDP_CONTEXT
from passes.recipes.context_parallel.way_costs import POSITIONS, ring_messages, sharded_seconds

__all__ = [
    "CONTEXT",
    "CONTEXT_AXES",
    "CONTEXT_WAYS",
    "FSDP_CONTEXT",
    "POSITIONS",
    "causal_positions",
    "is_long",
    "repeated_work",
    "ring_messages",
    "sharded_seconds",
]
