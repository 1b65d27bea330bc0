"""Tensor and sequence parallelism, as Megatron-LM does it, found in the graph."""

from __future__ import annotations

from passes.recipes.megatron.tensor_parallel import MEGATRON

__all__ = ["MEGATRON"]
