"""Send: every rank of a ring gets the part of a neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from passes._torch import SEND as SEND_OP
from passes.ir.collectives.formulas import A, B, N, S, Where, a, b, c, p, s
from passes.ir.collectives.kind import Fabric, Kind, register
from passes.ir.collectives.lowering import StepCall
from passes.ir.layout import Shard


def send(value: torch.Tensor, axes: Sequence[str], offset: int = 1) -> torch.Tensor:
    """Give each rank of a ring the part of the rank `offset` places before it."""
    return value


def _lower(call: StepCall) -> Node:
    offset = call.args[0] if call.args else 1
    return call.wait(call.emit(SEND_OP, call.contiguous(call.value), offset, call.group))


def _sent_around(calls: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    return [calls[(place - offset) % len(calls)][0] for place, (_, offset, _) in enumerate(calls)]


def _seconds(fabric: Fabric) -> sympy.Expr:
    """Return the seconds of the slowest message: across nodes, that of the rank next to another node."""
    inside = N / b + 2 * N / c
    return s + a + inside if fabric.where == "inside" else S + A + sympy.Max(inside, N / B, evaluate=False)


def _sent(where: Where) -> tuple[sympy.Expr, sympy.Expr]:
    return (N, sympy.Integer(0)) if where == "inside" else (N - N / p, N / p)  # of p ranks, one is next to another node


SEND = register(
    Kind(
        step=send,
        moves=lambda have, to: isinstance(have, Shard) and have == to,
        lower=_lower,
        ops={SEND_OP: _sent_around},
        received=lambda before, after, ranks: before,
        pieces=lambda before, after, ranks: before,
        seconds=_seconds,
        sent=_sent,
        is_reshard=False,  # another rank's part is another value
        takes_one_axis=True,
        source="a message is a latency and its bytes over the bandwidth of its link",
    )
)
