"""Symmetric memory: an all-gather or a reduce-scatter and its matrix products as one operator, which overlaps them.

The operators are torch's `symm_mem.fused_all_gather_matmul` and `symm_mem.fused_matmul_reduce_scatter`. Those need a
process group even for fake tensors, and run on CUDA only. The ops defined here take the number of ranks instead, as
those of `_c10d_functional` do, so that a plan needs no group; they call torch's operators on CUDA, and its fallback on
CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import _symmetric_memory as symmetric_memory

_LIBRARIES: Any = torch.library  # not typed
_LIBRARY = _LIBRARIES.Library("autoshard", "DEF")
_LIBRARY.define(
    "all_gather_matmul(Tensor part, Tensor[] others, int dim, bool keep, int ranks, str group) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define(
    "matmul_reduce_scatter(Tensor rows, Tensor other, str reduction, int dim, int ranks, str group) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _all_gather_matmul(
    part: torch.Tensor, others: Sequence[torch.Tensor], dim: int, keep: bool, ranks: int, group: str
) -> list[torch.Tensor]:
    """Return the products of the value gathered along `dim`, and with `keep`, after them, that value."""
    op: Callable[..., Any] = torch.ops.symm_mem.fused_all_gather_matmul
    return _kept(*op(part, list(others), dim, group, return_A=keep))


def _all_gather_matmul_fallback(
    part: torch.Tensor, others: Sequence[torch.Tensor], dim: int, keep: bool, ranks: int, group: str
) -> list[torch.Tensor]:
    op: Callable[..., Any] = symmetric_memory._fused_all_gather_matmul_fallback
    return _kept(*op(part, list(others), dim, group, return_A=keep))


def _kept(gathered: torch.Tensor | None, products: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*products, *([] if gathered is None else [gathered])]


def _all_gather_matmul_meta(
    part: torch.Tensor, others: Sequence[torch.Tensor], dim: int, keep: bool, ranks: int, group: str
) -> list[torch.Tensor]:
    """Return empty results with `dim` outermost in memory, as the operator computes rows rank by rank."""
    first, *rest = part.movedim(dim, 0).shape[:-1]
    widths = [*(other.shape[1] for other in others), *([part.shape[-1]] if keep else [])]
    return [part.new_empty(first * ranks, *rest, width).movedim(0, dim) for width in widths]


def _matmul_reduce_scatter(
    rows: torch.Tensor, other: torch.Tensor, reduction: str, dim: int, ranks: int, group: str
) -> torch.Tensor:
    op: Callable[..., torch.Tensor] = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return op(rows, other, reduction, dim, group)


def _matmul_reduce_scatter_fallback(
    rows: torch.Tensor, other: torch.Tensor, reduction: str, dim: int, ranks: int, group: str
) -> torch.Tensor:
    op: Callable[..., torch.Tensor] = symmetric_memory._fused_matmul_reduce_scatter_fallback
    return op(rows, other, reduction, dim, group)


def _matmul_reduce_scatter_meta(
    rows: torch.Tensor, other: torch.Tensor, reduction: str, dim: int, ranks: int, group: str
) -> torch.Tensor:
    shape = [*rows.shape[:-1], other.shape[1]]
    shape[dim] //= ranks
    return rows.new_empty(shape)


_LIBRARY.impl("all_gather_matmul", _all_gather_matmul, "CUDA")
_LIBRARY.impl("all_gather_matmul", _all_gather_matmul_fallback, "CPU")
_LIBRARY.impl("all_gather_matmul", _all_gather_matmul_meta, "Meta")
_LIBRARY.impl("matmul_reduce_scatter", _matmul_reduce_scatter, "CUDA")
_LIBRARY.impl("matmul_reduce_scatter", _matmul_reduce_scatter_fallback, "CPU")
_LIBRARY.impl("matmul_reduce_scatter", _matmul_reduce_scatter_meta, "Meta")

ALL_GATHER_MATMUL = torch.ops.autoshard.all_gather_matmul.default
MATMUL_REDUCE_SCATTER = torch.ops.autoshard.matmul_reduce_scatter.default


def reserve_symmetric_memory(group: str, nbytes: int) -> None:
    """Allocate memory on each rank of a CUDA group that all of them can access; all its ranks must call this.

    Raises RuntimeError if the devices cannot access each other's memory.
    """
    symmetric_memory.get_symm_mem_workspace(group, min_size=nbytes)  # type: ignore[arg-type]
