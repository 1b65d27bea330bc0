"""Per-device forms of the steps of a reshard: functional collectives between views and permutes.

A dim of a per-device tensor is what is left of the global dim's digits. Every step therefore views the
tensor as those digits, exposes or receives the digit of the axes that move, permutes it from or to its
place, and views the result back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.ir.collective import all_gather, all_reduce, all_to_all, reduce_scatter, take_part, take_term
from passes.ir.layout import IDENTITIES, Layout, Partial, Shard
from passes.ir.mesh import Mesh

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Emitter(Protocol):
    """Adds per-device calls to the graph."""

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call and return its node."""

    def coordinate(self, axis: int) -> Node:
        """This rank's place on a mesh axis: i64[1]."""


@dataclass(frozen=True)
class StepCall:
    """One step on a per-device value: global shape, layouts before and after, the axes that move."""

    emitter: Emitter
    mesh: Mesh
    value: Node
    shape: tuple[int, ...]
    before: Layout
    after: Layout
    axes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.sizes[axis] for axis in self.axes)

    @property
    def group(self) -> str:
        return self.mesh.group_name(tuple(self.mesh.names[axis] for axis in self.axes))

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return self.emitter.emit(op, *args, **kwargs)

    def view(self, value: Node, shape: Sequence[int]) -> Node:
        return self.emit(aten.view.default, value, list(shape))

    def permute(self, value: Node, order: Sequence[int]) -> Node:
        return value if list(order) == sorted(order) else self.emit(aten.permute.default, value, list(order))

    def contiguous(self, value: Node) -> Node:
        if value.meta["val"].is_contiguous():
            return value
        return self.emit(aten.clone.default, value, memory_format=torch.contiguous_format)

    def wait(self, value: Node) -> Node:
        return self.emit(c10d.wait_tensor.default, value)


@dataclass(frozen=True)
class _Digit:
    """One digit of one dim: an axis's, or free (axis None)."""

    length: int
    axis: int | None
    dim: int
    position: int = 0  # tells equal free digits apart


def step_form(target: object) -> Callable[[StepCall], Node]:
    """The per-device form of a step."""
    return _FORMS[target]


def _all_gather(call: StepCall) -> Node:
    digits = _digits(call.before, call.shape, call.mesh)
    local = [d for d in digits if d.axis is None]
    gathered = call.emit(c10d.all_gather_into_tensor.default, call.contiguous(call.value), call.ranks, call.group)
    have = [*(_axis_digit(digits, axis) for axis in call.axes), *local]
    return _join(call, call.wait(gathered), have, [d for d in digits if d.axis is None or d.axis in call.axes])


def _reduce_scatter(call: StepCall) -> Node:
    front, rest = _expose(call)
    flat = call.view(front, [call.ranks, math.prod(d.length for d in rest)])
    scattered = call.emit(c10d.reduce_scatter_tensor.default, flat, _reduction(call), call.ranks, call.group)
    return call.view(call.wait(scattered), _merged(rest, len(call.shape)))


def _reduction(call: StepCall) -> str:
    placement = call.before.on(call.axes[0])
    assert isinstance(placement, Partial)
    return placement.op


def _all_reduce(call: StepCall) -> Node:
    return call.wait(call.emit(c10d.all_reduce.default, call.contiguous(call.value), _reduction(call), call.group))


def _take_part(call: StepCall) -> Node:
    front, rest = _expose(call)
    for axis in call.axes:
        coordinate = call.emitter.coordinate(axis)
        front = call.emit(aten.index.Tensor, front, [coordinate])
        shape = front.meta["val"].shape[1:]
        front = call.view(front, shape)
    return call.view(front, _merged(rest, len(call.shape)))


def _take_term(call: StepCall) -> Node:
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


def _all_to_all(call: StepCall) -> Node:
    """The new digit goes out, the old one comes in: both are exposed on a mesh with the axis twice."""
    axis = call.axes[0]
    size = call.mesh.sizes[axis]
    twice = Mesh((*call.mesh.names, f"{call.mesh.names[axis]}_new"), (*call.mesh.sizes, size))
    both = Layout((*call.before.placements, call.after.on(axis)))
    new = call.mesh.ndim
    digits = _digits(both, call.shape, twice)
    held = [d for d in digits if d.axis is None or d.axis == new]
    sent = [d for d in held if d.axis == new] + [d for d in held if d.axis is None]
    exposed = call.permute(call.view(call.value, [d.length for d in held]), [held.index(d) for d in sent])
    pieces = call.view(call.contiguous(exposed), [size, math.prod(d.length for d in sent[1:])])
    ones = [1] * size
    received = call.wait(call.emit(c10d.all_to_all_single.default, pieces, ones, ones, call.group))
    have = [_axis_digit(digits, axis), *(d for d in held if d.axis is None)]
    return _join(call, received, have, [d for d in digits if d.axis is None or d.axis == axis])


def _expose(call: StepCall) -> tuple[Node, list[_Digit]]:
    """The value with the digits of the moving axes in front, in mesh order, and the digits behind them."""
    digits = _digits(call.after, call.shape, call.mesh)
    held = [d for d in digits if d.axis is None or d.axis in call.axes]
    rest = [d for d in held if d.axis is None]
    order = [*(_axis_digit(held, axis) for axis in call.axes), *rest]
    split = call.view(_padded(call, held), [d.length for d in held])
    return call.contiguous(call.permute(split, [held.index(d) for d in order])), rest


def _padded(call: StepCall, held: list[_Digit]) -> Node:
    """Pad every dim whose innermost digit does not divide, so that it does."""
    value = call.value
    for dim, (lead, have, want) in _padding(call, held).items():
        shape = list(value.meta["val"].shape)
        split = call.view(value, [*shape[:dim], lead, have, *shape[dim + 1 :]])
        pad = [0, 0] * (len(shape) - dim - 1) + [0, want - have]
        padded = call.emit(aten.constant_pad_nd.default, split, pad, 0)
        value = call.view(padded, [*shape[:dim], lead * want, *shape[dim + 1 :]])
    return value


def _join(call: StepCall, value: Node, have: list[_Digit], want: list[_Digit]) -> Node:
    """View `value` as digits `have`, order them as `want`, merge each dim, and cut off padding."""
    split = call.view(value, [d.length for d in have])
    joined = call.contiguous(call.permute(split, [have.index(d) for d in want]))
    shape = _merged(want, len(call.shape))
    value = call.view(joined, shape)
    for dim, (lead, length, padded) in _padding(call, want).items():
        shape = list(value.meta["val"].shape)
        split = call.view(value, [*shape[:dim], lead, padded, *shape[dim + 1 :]])
        cut = call.contiguous(call.emit(aten.slice.Tensor, split, dim + 1, 0, length))
        value = call.view(cut, [*shape[:dim], lead * length, *shape[dim + 1 :]])
    return value


def _padding(call: StepCall, held: list[_Digit]) -> dict[int, tuple[int, int, int]]:
    """Dim -> (length outside, real length, padded length), where a moving axis pads it."""
    found = {}
    layout = call.after if any(isinstance(call.after.on(a), Shard) for a in call.axes) else call.before
    for dim, size in enumerate(call.shape):
        axes = layout.axes_on(dim)
        if not axes or axes[-1] not in call.axes:
            continue
        placement = layout.on(axes[-1])
        assert isinstance(placement, Shard)
        real = size // placement.outer
        part = -(-real // call.mesh.sizes[axes[-1]])
        padded = part * call.mesh.sizes[axes[-1]]
        if padded != real:
            whole = math.prod(d.length for d in held if d.dim == dim)
            found[dim] = (whole // padded, real, padded)
    return found


def _digits(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[_Digit]:
    """All digits of all dims, outermost first: free ones between those of axes."""
    found = []
    for dim, size in enumerate(shape):
        end = 1
        for axis in layout.axes_on(dim):
            placement = layout.on(axis)
            assert isinstance(placement, Shard)
            found.append(_Digit(placement.outer // end, None, dim))
            found.append(_Digit(mesh.sizes[axis], axis, dim))
            end = placement.outer * mesh.sizes[axis]
        found.append(_Digit(-(-size // end), None, dim))
    kept = [digit for digit in found if digit.axis is not None or digit.length != 1]
    return [replace(digit, position=i) for i, digit in enumerate(kept)]


def _axis_digit(digits: list[_Digit], axis: int) -> _Digit:
    return next(d for d in digits if d.axis == axis)


def _merged(digits: list[_Digit], ndim: int) -> list[int]:
    return [math.prod(d.length for d in digits if d.dim == dim) for dim in range(ndim)]


_FORMS: dict[object, Callable[[StepCall], Node]] = {
    all_gather: _all_gather,
    reduce_scatter: _reduce_scatter,
    all_reduce: _all_reduce,
    all_to_all: _all_to_all,
    take_part: _take_part,
    take_term: _take_term,
}
