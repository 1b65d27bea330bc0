"""All-gather: every rank gets all parts of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from passes._torch import ALL_GATHER_MATMUL
from passes.ir.collectives.formulas import spread_formula
from passes.ir.collectives.kind import Fabric, Kind, quickest, register
from passes.ir.collectives.lowering import StepCall, axis_digit, digits_of, join
from passes.ir.layout import R, Shard

c10d = torch.ops._c10d_functional

Calls = Sequence[Sequence[Any]]


def all_gather(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Take `axes` from `S` to `R`, in one collective over their product."""
    return value


def _lower(call: StepCall) -> Node:
    digits = digits_of(call.before, call.shape, call.mesh.sizes)
    local = [d for d in digits if d.axis is None]
    gathered = call.emit(c10d.all_gather_into_tensor.default, call.contiguous(call.value), call.ranks, call.group)
    have = [*(axis_digit(digits, axis) for axis in call.axes), *local]
    return join(call, call.wait(gathered), have, [d for d in digits if d.axis is None or d.axis in call.axes])


def _sweeps(fabric: Fabric) -> int:
    return 1


def _seconds(fabric: Fabric) -> sympy.Expr:
    return quickest(fabric, sweeps=_sweeps(fabric))


def _gathered(calls: Calls) -> list[torch.Tensor]:
    return [torch.cat([part for part, *_ in calls])] * len(calls)


def _gathered_lists(calls: Calls) -> list[list[torch.Tensor]]:
    return [[torch.cat(parts) for parts in zip(*(parts for parts, *_ in calls), strict=True)]] * len(calls)


def _gathered_and_multiplied(calls: Calls) -> list[list[torch.Tensor]]:
    _, _, dim, keep, *_ = calls[0]
    whole = torch.cat([call[0] for call in calls], dim)
    return [[*(torch.matmul(whole, other) for other in call[1]), *([whole] if keep else [])] for call in calls]


ALL_GATHER = register(
    Kind(
        step=all_gather,
        moves=lambda have, to: isinstance(have, Shard) and to == R,
        lower=_lower,
        ops={
            c10d.all_gather_into_tensor.default: _gathered,
            c10d.all_gather_into_tensor_coalesced.default: _gathered_lists,
            ALL_GATHER_MATMUL: _gathered_and_multiplied,
        },
        received=lambda before, after, ranks: (ranks - 1) * before,
        pieces=lambda before, after, ranks: (ranks - 1) * before,
        seconds=_seconds,
        sent=lambda where: spread_formula(where, sweeps=1),
        bucket="gather",
        sweeps=_sweeps,
        timed=lambda part, whole, ranks, group: c10d.all_gather_into_tensor(part, ranks, group),
        counts_ranks=True,
        source="NCCL's ring, tree and NVLink SHARP (tests/cost/test_collective.py)",
    )
)
