"""Inductor's settings that keep the order of a graph: all that move, merge or split collectives and waits are off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from passes._torch.inductor.inductor_order import GraphOrder, JoinsBetweenCollectives
from passes._torch.supported import OLDEST, release, unsupported

# A setting, the value that keeps the order, and the release that introduced it.
_SETTINGS: tuple[tuple[str, Any, tuple[int, int]], ...] = (
    ("reorder_for_peak_memory", False, OLDEST),
    ("reorder_for_locality", False, OLDEST),
    ("reorder_for_compute_comm_overlap", False, OLDEST),
    ("aten_distributed_optimizations.enable_overlap_scheduling", False, OLDEST),
    ("aten_distributed_optimizations.enable_simple_overlap", False, (2, 14)),  # on by default there
    ("bucket_all_gathers_fx", "none", OLDEST),
    ("bucket_reduce_scatters_fx", "none", OLDEST),
    ("bucket_all_reduces_fx", "none", OLDEST),
    ("dedup_reduce_scatters", False, OLDEST),
    # Before fusion, keep kernels from being fused across collectives; after it, restore the order of the graph.
    ("_pre_fusion_custom_pass", JoinsBetweenCollectives(), OLDEST),
    ("_post_fusion_custom_pass", GraphOrder(), OLDEST),
)

# Settings that are on by default and named like ones that reorder, but move no collective by themselves.
_HARMLESS = frozenset(
    {
        "aten_distributed_optimizations.prioritize_bucketing_during_scheduling",  # part of enable_overlap_scheduling
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives",  # part of enable_overlap_scheduling
        "triton.reorder_for_reducing_graph_partitions",  # moves kernels between CUDA graphs
        "test_configs.assume_bucketing_reduces_latency",  # part of enable_overlap_scheduling
    }
)
_REORDERS = re.compile(r"reorder|overlap|bucket|dedup|decompos\w*_comm|comms_decompos")


def order_settings(config: Mapping[str, Any], version: str = torch.__version__) -> dict[str, Any]:
    """Return the settings with which Inductor keeps a graph's order.

    Raises ImportError if `config` lacks a setting that this release of torch should have, or has an unknown one that is
    on and reorders collectives by its name.
    """
    wanted = {name: value for name, value, since in _SETTINGS if since <= release(version) or name in config}
    missing = [name for name in wanted if name not in config]
    if missing:
        raise unsupported(f"Inductor has no setting {missing[0]!r}, which keeps collectives in order", version)
    new = [name for name in config if config[name] is True and name not in wanted and _REORDERS.search(name)]
    new = [name for name in new if name not in _HARMLESS]
    if new:
        raise unsupported(f"Inductor's setting {new[0]!r} is new, on, and may reorder collectives", version)
    return wanted
