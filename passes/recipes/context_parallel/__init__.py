"""Context parallelism: the sequence is sharded, and attention gathers keys, passes them around, or exchanges heads."""

from __future__ import annotations

from passes.recipes.context_parallel.sequences import CONTEXT, CONTEXT_WAYS

__all__ = ["CONTEXT", "CONTEXT_WAYS"]
