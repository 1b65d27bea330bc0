"""All-to-all: every rank sends each other one its part of a dim, and gets parts of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from passes.ir.collectives.formulas import N, Where, exchange_formula, k, p
from passes.ir.collectives.kind import Kind, register
from passes.ir.collectives.lowering import StepCall, axis_digit, digits_of, join, unmirrored
from passes.ir.layout import Layout, Shard, is_even_over
from passes.ir.mesh import Mesh

c10d = torch.ops._c10d_functional


def all_to_all(value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Take one axis from `S` to `S` of another digit."""
    return value


def _lower(call: StepCall) -> Node:
    """Send the new digit and receive the old one, both exposed as axes of a mesh that has the axis twice."""
    axis = call.axes[0]
    size = call.mesh.sizes[axis]
    both = Layout((*call.before.placements, call.after.on(axis)))
    new = call.mesh.ndim
    digits = digits_of(both, call.shape, _with_new(axis, call.mesh))
    held = [d for d in digits if d.axis is None or d.axis == new]
    sent = [d for d in held if d.axis == new] + [d for d in held if d.axis is None]
    split = unmirrored(call, call.view(call.value, [d.length for d in held]), held)
    exposed = call.permute(split, [held.index(d) for d in sent])
    pieces = call.view(call.contiguous(exposed), [size, math.prod(d.length for d in sent[1:])])
    ones = [1] * size
    received = call.wait(call.emit(c10d.all_to_all_single.default, pieces, ones, ones, call.group))
    have = [axis_digit(digits, axis), *(d for d in held if d.axis is None)]
    return join(call, received, have, [d for d in digits if d.axis is None or d.axis == axis])


def _fits(layout: Layout, after: Layout, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Return whether the axis's old and new digits are adjacent, so that one can be exchanged for the other."""
    return is_even_over((*layout.placements, after.on(axis)), tuple(shape), _with_new(axis, mesh))


def _with_new(axis: int, mesh: Mesh) -> tuple[int, ...]:
    """Return the sizes of the axes, and that of `axis` once more: for its new place."""
    return (*mesh.sizes, mesh.sizes[axis])


def _sent(where: Where) -> tuple[sympy.Expr, sympy.Expr]:
    sent = (k - 1) / k * N
    if where == "inside":
        return sent, sympy.Integer(0)
    network = (k - p) / k * N  # all but p ranks are on other nodes
    return sympy.simplify(sent - network), network


def _exchanged(calls: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    pieces = [torch.split(value, inputs) for value, _, inputs, *_ in calls]
    return [torch.cat([sent[place] for sent in pieces]) for place in range(len(calls))]


def _timed(part: torch.Tensor, whole: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    even = [part.numel()] * ranks
    exchanged: torch.Tensor = c10d.all_to_all_single(whole, even, even, group)
    return exchanged


ALL_TO_ALL = register(
    Kind(
        step=all_to_all,
        moves=lambda have, to: isinstance(have, Shard) and isinstance(to, Shard) and have != to,
        lower=_lower,
        ops={c10d.all_to_all_single.default: _exchanged},
        received=lambda before, after, ranks: before * (ranks - 1) // ranks,
        pieces=lambda before, after, ranks: (ranks - 1) * -(-before // ranks),
        seconds=lambda fabric: exchange_formula(fabric.where),
        sent=_sent,
        timed=_timed,
        takes_one_axis=True,
        fits=_fits,
        source="NCCL's sends and receives (tests/cost/test_collective.py)",
    )
)
