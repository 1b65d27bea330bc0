"""Steps of a reshard that send nothing: a rank keeps its part of a value that all have, or its term."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from passes.ir.collectives.kind import Kind, register
from passes.ir.collectives.lowering import StepCall, expose, merged
from passes.ir.layout import IDENTITIES, Partial, R, Shard

aten = torch.ops.aten


def take_part(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Take `axes` from `R` to `S`: every rank keeps its part."""
    return value


def take_term(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Take `axes` from `R` to `P`: of a sum or product the first rank keeps the value and the others hold zero or one;
    of a maximum, minimum or mean all keep it."""
    return value


def _lower_part(call: StepCall) -> Node:
    front, rest = expose(call)
    for axis in call.axes:
        coordinate = call.emitter.coordinate(axis)
        front = call.emit(aten.index.Tensor, front, [coordinate])
        shape = front.meta["val"].shape[1:]
        front = call.view(front, shape)
    return call.view(front, merged(rest, len(call.shape)))


def _lower_term(call: StepCall) -> Node:
    value = call.value
    held = value.meta["val"]
    identities: dict[str, Node] = {}
    for axis in call.axes:
        placement = call.after.on(axis)
        assert isinstance(placement, Partial)
        if placement.op not in IDENTITIES:
            continue
        if placement.op not in identities:
            fill = IDENTITIES[placement.op]
            full = call.emit(aten.full.default, [], fill, dtype=held.dtype, device=held.device, pin_memory=False)
            identities[placement.op] = full
        first = call.view(call.emit(aten.eq.Scalar, call.emitter.coordinate(axis), 0), [])
        value = call.emit(aten.where.self, first, value, identities[placement.op])
    return value


TAKE_PART = register(Kind(take_part, lambda have, to: have == R and isinstance(to, Shard), _lower_part))
TAKE_TERM = register(Kind(take_term, lambda have, to: have == R and isinstance(to, Partial), _lower_term))
