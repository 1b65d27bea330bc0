"""Inductor's settings that keep the order of a graph: all that move, merge or split collectives and waits are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from passes._torch.inductor.inductor_config import checked_settings
from passes._torch.inductor.inductor_order import GraphOrder, JoinsBetweenCollectives


def order_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which Inductor keeps a graph's order. Raises ImportError as `checked_settings` does."""
    return checked_settings(config) | {
        # Before fusion, keep kernels from being fused across collectives; after it, restore the order of the graph.
        "_pre_fusion_custom_pass": JoinsBetweenCollectives(),
        "_post_fusion_custom_pass": GraphOrder(),
    }
