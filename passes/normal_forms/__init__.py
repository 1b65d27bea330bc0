"""The rewrites of `normalize`, a file per family; `REWRITES` maps each op to its rewrite, where one is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from passes.normal_forms import bags, determinants, parts, reductions, scans, strides, views
from passes.normal_forms.convolutions import align_convolutions
from passes.normal_forms.projections import Split, split_projections
from passes.normal_forms.rewriting import At

REWRITES: Mapping[Any, Callable[[At], bool]] = {
    **views.REWRITES,
    **strides.REWRITES,
    **reductions.REWRITES,
    **parts.REWRITES,
    **bags.REWRITES,
    **determinants.REWRITES,
    **scans.REWRITES,
}

__all__ = ["REWRITES", "At", "Split", "align_convolutions", "split_projections"]
