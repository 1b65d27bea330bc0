"""All-reduce: terms are reduced, and every rank gets the whole result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from passes.ir.collectives.formulas import spread_formula
from passes.ir.collectives.kind import Fabric, Kind, quickest, register
from passes.ir.collectives.lowering import StepCall
from passes.ir.layout import Partial, R, reduce_terms

c10d = torch.ops._c10d_functional


def all_reduce(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Take `axes` from `P` to `R`, in one collective over their product."""
    return value


def _lower(call: StepCall) -> Node:
    return call.wait(call.emit(c10d.all_reduce.default, call.contiguous(call.value), call.reduction, call.group))


def _sweeps(fabric: Fabric) -> int:
    return 2


def _seconds(fabric: Fabric) -> sympy.Expr:
    return quickest(fabric, sweeps=_sweeps(fabric))


def _reduced(calls: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    return [reduce_terms(torch.stack([term for term, *_ in calls]), calls[0][1])] * len(calls)


ALL_REDUCE = register(
    Kind(
        step=all_reduce,
        moves=lambda have, to: isinstance(have, Partial) and to == R,
        lower=_lower,
        ops={c10d.all_reduce.default: _reduced},
        received=lambda before, after, ranks: 2 * before * (ranks - 1) // ranks,
        pieces=lambda before, after, ranks: 2 * (ranks - 1) * -(-before // ranks),
        seconds=_seconds,
        sent=lambda where: spread_formula(where, sweeps=2),
        bucket="reduction",
        sweeps=_sweeps,
        timed=lambda part, whole, ranks, group: c10d.all_reduce(whole, "sum", group),
        in_place=True,
        source="NCCL's ring, tree and NVLink SHARP (tests/cost/test_collective.py)",
    )
)
