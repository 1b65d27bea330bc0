"""Reduce-scatter: terms are added, and every rank gets its part of the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from passes._torch import MATMUL_REDUCE_SCATTER
from passes.ir.collectives.formulas import spread_formula
from passes.ir.collectives.kind import Fabric, Kind, quickest, register
from passes.ir.collectives.lowering import StepCall, expose, merged
from passes.ir.layout import Partial, Shard, reduce_terms

c10d = torch.ops._c10d_functional

Calls = Sequence[Sequence[Any]]


def reduce_scatter(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Take `axes` from `P` to `S`, in one collective over their product."""
    return value


def _lower(call: StepCall) -> Node:
    front, rest = expose(call)
    flat = call.view(front, [call.ranks, math.prod(d.length for d in rest)])
    scattered = call.emit(c10d.reduce_scatter_tensor.default, flat, call.reduction, call.ranks, call.group)
    return call.view(call.wait(scattered), merged(rest, len(call.shape)))


def _sweeps(fabric: Fabric) -> int:
    return 2 if fabric.scatter_sends_all else 1


def _seconds(fabric: Fabric) -> sympy.Expr:
    return quickest(fabric, sweeps=_sweeps(fabric))


def _scattered(calls: Calls) -> list[torch.Tensor]:
    return list(reduce_terms(torch.stack([term for term, *_ in calls]), calls[0][1]).chunk(len(calls)))


def _scattered_lists(calls: Calls) -> list[list[torch.Tensor]]:
    op = calls[0][1]
    scattered = [_scattered([(term, op) for term in terms]) for terms in zip(*(call[0] for call in calls), strict=True)]
    return [list(parts) for parts in zip(*scattered, strict=True)]


def _multiplied_and_scattered(calls: Calls) -> list[torch.Tensor]:
    _, _, reduction, dim, *_ = calls[0]
    total = reduce_terms(torch.stack([torch.matmul(rows, other) for rows, other, *_ in calls]), reduction)
    return [part.contiguous() for part in total.chunk(len(calls), dim)]


REDUCE_SCATTER = register(
    Kind(
        step=reduce_scatter,
        moves=lambda have, to: have == Partial("sum") and isinstance(to, Shard),
        lower=_lower,
        ops={
            c10d.reduce_scatter_tensor.default: _scattered,
            c10d.reduce_scatter_tensor_coalesced.default: _scattered_lists,
            MATMUL_REDUCE_SCATTER: _multiplied_and_scattered,
        },
        received=lambda before, after, ranks: (ranks - 1) * after,
        pieces=lambda before, after, ranks: (ranks - 1) * after,
        seconds=_seconds,
        sent=lambda where: spread_formula(where, sweeps=1),
        bucket="reduction",
        sweeps=_sweeps,
        timed=lambda part, whole, ranks, group: c10d.reduce_scatter_tensor(whole, "sum", ranks, group),
        counts_ranks=True,
        source="NCCL's ring, tree and NVLink SHARP (tests/cost/test_collective.py)",
    )
)
