"""Check that Inductor has the settings that keep a graph's order, from its source: importing it takes over a second."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from passes._torch.supported import OLDEST, release, unsupported

# A setting, the value that keeps the order of a graph, and the release that introduced it. All that move, merge or split
# collectives and waits are off.
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
    ("_pre_fusion_custom_pass", None, OLDEST),  # `inductor_settings` sets these two
    ("_post_fusion_custom_pass", None, OLDEST),
)

# Settings that are on by default and named like ones that reorder, but move no collective by themselves.
_HARMLESS = frozenset(
    {
        "aten_distributed_optimizations.prioritize_bucketing_during_scheduling",  # part of enable_overlap_scheduling
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives",  # part of enable_overlap_scheduling
        "triton.reorder_for_reducing_graph_partitions",  # moves kernels between CUDA graphs
        "test_configs.assume_bucketing_reduces_latency",  # part of enable_overlap_scheduling
        "reorder_for_locality_in_training",  # part of reorder_for_locality, from 2.14 on
    }
)
_REORDERS = re.compile(r"reorder|overlap|bucket|dedup|decompos\w*_comm|comms_decompos")
_SOURCE = Path(torch.__file__).with_name("_inductor") / "config.py"


def checked_settings(config: Mapping[str, Any], version: str = torch.__version__) -> dict[str, Any]:
    """Return the values of settings with which Inductor keeps a graph's order.

    Raises ImportError if `config` lacks a setting that this release of torch should have, or has an unknown one that is
    on and reorders collectives by its name.
    """
    missing, new = _unexpected(config, {name for name, value in config.items() if value is True}, version)
    if missing:
        raise unsupported(f"Inductor has no setting {missing[0]!r}, which keeps collectives in order", version)
    if new:
        raise unsupported(f"Inductor's setting {new[0]!r} is new, on, and may reorder collectives", version)
    return {name: value for name, value, since in _SETTINGS if since <= release(version) or name in config}


def check_source(source: Path = _SOURCE, version: str = torch.__version__) -> None:
    """Raise ImportError as `checked_settings` does, at the cost of parsing one file (20 ms) instead of importing it.

    If the file does not show that all is well, the configuration is imported and asked.
    """
    values = _declared(source.read_text(encoding="utf-8")) if source.is_file() else {}
    if any(_unexpected(values, {name for name, is_other in values.items() if not is_other}, version)):
        checked_settings(importlib.import_module("torch._inductor.config").get_config_copy(), version)


def _unexpected(names: Collection[str], on: Collection[str], version: str) -> tuple[list[str], list[str]]:
    """Return the settings that are missing, and those that are unknown, among `on`, and named like ones that reorder."""
    known = {name for name, *_ in _SETTINGS} | _HARMLESS
    missing = [name for name, _, since in _SETTINGS if since <= release(version) and name not in names]
    return missing, [name for name in names if name in on and name not in known and _REORDERS.search(name)]


def _declared(text: str) -> dict[str, bool]:
    """Return, by name, whether each setting that the source of a configuration declares is certain not to be True."""
    found: dict[str, bool] = {}
    for node in ast.parse(text).body:
        prefix, body = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        for one in body:
            match one:
                case ast.AnnAssign(ast.Name(name), value=value) | ast.Assign([ast.Name(name)], value):
                    found[prefix + name] = _is_other_literal(value)
    return found


def _is_other_literal(value: ast.expr | None) -> bool:
    return isinstance(value, ast.List | ast.Tuple) or (isinstance(value, ast.Constant) and value.value is not True)
