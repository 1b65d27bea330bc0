"""Shared parts of the per-device forms of collectives: views and permutes around a functional collective.

A dim of a per-device tensor consists of the global dim's remaining digits. Every step therefore views the tensor as
those digits, exposes or receives the digit of the axes that move, permutes it from or to its place, and views the
result back. A mirrored digit is flipped in its second halves while it is exposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.ir.layout import Layout, Partial, Shard
from passes.ir.mesh import Mesh

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Emitter(Protocol):
    """Adds per-device calls to the graph."""

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call and return its node."""

    def coordinate(self, axis: int) -> Node:
        """Return this rank's place on a mesh axis: i64[1]."""


@dataclass(frozen=True)
class StepCall:
    """A step on a per-device value: its global shape, the layouts before and after, and the axes that move."""

    emitter: Emitter
    mesh: Mesh
    value: Node
    shape: tuple[int, ...]
    before: Layout
    after: Layout
    axes: tuple[int, ...]
    args: tuple[Any, ...] = ()  # further arguments of the step, such as the distance of a send

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

    @property
    def reduction(self) -> str:
        """Return what the ranks' terms are reduced by."""
        placement = self.before.on(self.axes[0])
        assert isinstance(placement, Partial)
        return placement.op

    def wait(self, value: Node) -> Node:
        return self.emit(c10d.wait_tensor.default, value)


@dataclass(frozen=True)
class Digit:
    """One digit of one dim: an axis's, or free (axis None). `outer` is the product of the digits before it."""

    length: int
    axis: int | None
    dim: int
    outer: int
    half: int | None = None  # of a mirrored digit, the product of those before the one that says in which half it is


def expose(call: StepCall) -> tuple[Node, list[Digit]]:
    """Return the value with the digits of the moving axes first, in mesh order, and the digits that follow them."""
    digits = digits_of(call.after, call.shape, call.mesh.sizes)
    held = [d for d in digits if d.axis is None or d.axis in call.axes]
    rest = [d for d in held if d.axis is None]
    order = [*(axis_digit(held, axis) for axis in call.axes), *rest]
    split = unmirrored(call, call.view(_padded(call, held), [d.length for d in held]), held)
    return call.contiguous(call.permute(split, [held.index(d) for d in order])), rest


def _padded(call: StepCall, held: list[Digit]) -> Node:
    """Pad every dim whose innermost digit does not divide, so that it does."""
    value = call.value
    for dim, (lead, have, want) in _padding(call, held).items():
        shape = list(value.meta["val"].shape)
        split = call.view(value, [*shape[:dim], lead, have, *shape[dim + 1 :]])
        pad = [0, 0] * (len(shape) - dim - 1) + [0, want - have]
        padded = call.emit(aten.constant_pad_nd.default, split, pad, 0)
        value = call.view(padded, [*shape[:dim], lead * want, *shape[dim + 1 :]])
    return value


def join(call: StepCall, value: Node, have: list[Digit], want: list[Digit]) -> Node:
    """View `value` as digits `have`, order them as `want`, merge each dim, and cut off padding."""
    split = call.view(value, [d.length for d in have])
    joined = call.contiguous(unmirrored(call, call.permute(split, [have.index(d) for d in want]), want))
    shape = merged(want, len(call.shape))
    value = call.view(joined, shape)
    for dim, (lead, length, padded) in _padding(call, want).items():
        shape = list(value.meta["val"].shape)
        split = call.view(value, [*shape[:dim], lead, padded, *shape[dim + 1 :]])
        cut = call.contiguous(call.emit(aten.slice.Tensor, split, dim + 1, 0, length))
        value = call.view(cut, [*shape[:dim], lead * length, *shape[dim + 1 :]])
    return value


def unmirrored(call: StepCall, value: Node, digits: list[Digit]) -> Node:
    """Flip the mirrored digits of a value viewed as `digits`, in their second halves."""
    flipped: dict[int, list[int]] = {}  # by the digit that says in which half they are
    for number, digit in enumerate(digits):
        if digit.axis is not None and digit.half is not None:
            half = next(i for i, d in enumerate(digits) if d.dim == digit.dim and d.outer == digit.half and d.length == 2)
            flipped.setdefault(half, []).append(number)
    for half, numbers in flipped.items():
        first, second = (call.emit(aten.slice.Tensor, value, half, i, i + 1) for i in range(2))
        value = call.emit(aten.cat.default, [first, call.emit(aten.flip.default, second, numbers)], half)
    return value


def _padding(call: StepCall, held: list[Digit]) -> dict[int, tuple[int, int, int]]:
    """Return (length outside, real length, padded length) by dim, where a moving axis pads it."""
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


def digits_of(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[Digit]:
    """Return all digits of all dims, outermost first: free ones between those of axes, which have these `sizes`."""
    found = []
    for dim, size in enumerate(shape):
        end = 1
        for axis in layout.axes_on(dim):
            placement = layout.on(axis)
            assert isinstance(placement, Shard)
            half = placement.half if placement.mirror else None
            if half is not None and half >= end:
                found += [Digit(half // end, None, dim, end), Digit(2, None, dim, half)]
                end = 2 * half
            found.append(Digit(placement.outer // end, None, dim, end))
            found.append(Digit(sizes[axis], axis, dim, placement.outer, half))
            end = placement.outer * sizes[axis]
        found.append(Digit(-(-size // end), None, dim, end))
    return [digit for digit in found if digit.axis is not None or digit.length != 1]


def axis_digit(digits: list[Digit], axis: int) -> Digit:
    return next(d for d in digits if d.axis == axis)


def merged(digits: list[Digit], ndim: int) -> list[int]:
    return [math.prod(d.length for d in digits if d.dim == dim) for dim in range(ndim)]
