"""Sharding rules of ops that change the shape of a tensor or the order of its elements.

They keep digits of the index: a reshape splits and merges dims into common factors, so that shardings pass in both
directions. All of them are linear and, as they only move elements, commute with every reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from passes.ir.call import Call
from passes.ir.fake_calls import is_viewable
from passes.ir.graph import tensor_of
from passes.ir.layout import PARTIAL_OPS
from passes.rules.factors import Dim, Factors, whole_dims
from passes.rules.rule import Linear, LocalCall, Space, SpaceOf, register, remade

aten = torch.ops.aten
prims = torch.ops.prims

MOVES = (Linear((0,), PARTIAL_OPS),)


def local_reshape(call: LocalCall) -> Node:
    """Reshape to the per-device shape of the result, after a copy if the strides allow no view."""
    operand, shape = call.operands[0], list(call.local_shape())
    if not is_viewable(tensor_of(operand), shape):
        operand = call.emit(aten.clone.default, operand, memory_format=torch.contiguous_format)
    return call.emit(aten.view.default, operand, shape)


def _reshape(call: Call) -> Space:
    factors = Factors()
    operand, result = regroup(factors, call.operands[0].shape, call.result.shape)
    return factors.space([operand], [result], linear=MOVES)


def regroup(factors: Factors, old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """Return the dims of two shapes with the same number of elements, in shared factors.

    From both ends, the greatest common divisor of the two dims that meet becomes a factor. What remains in the middle
    has no counterpart and is blocked: `[4, 9] -> [6, 6]` shares 2 at the front, 3 at the back, and blocks the rest.
    """
    if 0 in old:
        return (
            factors.dims(old, blocked=range(len(old)), prefix="old"),
            factors.dims(new, blocked=range(len(new)), prefix="new"),
        )
    left, right = list(old), list(new)
    front = _common(left, right, list(range(len(left))), list(range(len(right))))
    back = _common(left, right, list(reversed(range(len(left)))), list(reversed(range(len(right)))))
    sides: list[list[Dim]] = []
    for side, rest, prefix in ((0, left, "old"), (1, right, "new")):
        outside: list[Dim] = [()] * len(rest)
        inside: list[Dim] = [()] * len(rest)
        for number, (size, *at) in enumerate(front):
            outside[at[side]] += factors.one(f"front{number}", size)
        for number, (size, *at) in enumerate(back):
            inside[at[side]] = factors.one(f"back{number}", size) + inside[at[side]]
        middle = [factors.one(f"{prefix}{dim}", size, blocked=True) for dim, size in enumerate(rest)]
        sides.append([a + b + c for a, b, c in zip(outside, middle, inside, strict=True)])
    return sides[0], sides[1]


def _common(left: list[int], right: list[int], rows: list[int], columns: list[int]) -> list[tuple[int, int, int]]:
    """Return common factors (size, left dim, right dim) from one end on, and divide both sides by them."""
    found: list[tuple[int, int, int]] = []
    while True:
        rows = [dim for dim in rows if left[dim] > 1]
        columns = [dim for dim in columns if right[dim] > 1]
        size = math.gcd(left[rows[0]], right[columns[0]]) if rows and columns else 1
        if size == 1:
            return found
        found.append((size, rows[0], columns[0]))
        left[rows[0]] //= size
        right[columns[0]] //= size


def _permute(call: Call) -> Space:
    return _ordered(call, [dim % call.result.ndim for dim in call.arg("dims")])


def _transpose(call: Call) -> Space:
    ndim = call.result.ndim
    order = list(range(ndim))
    if ndim:
        a, b = call.arg("dim0") % ndim, call.arg("dim1") % ndim
        order[a], order[b] = order[b], order[a]
    return _ordered(call, order)


def _t(call: Call) -> Space:
    return _ordered(call, list(reversed(range(call.result.ndim))))


def _ordered(call: Call, order: list[int]) -> Space:
    factors = Factors()
    operand = factors.dims(call.operands[0].shape)
    return factors.space([operand], [[operand[dim] for dim in order]], linear=MOVES)


def _squeeze(call: Call) -> Space:
    shape = call.operands[0].shape
    named = [parameter.name for parameter in call.op._schema.arguments]
    dims = call.arg("dim") if "dim" in named else range(len(shape))
    dropped = whole_dims(dims, len(shape)) if isinstance(dims, int) or dims else ()
    factors = Factors()
    operand = factors.dims(shape)
    result = [factor for dim, factor in enumerate(operand) if shape[dim] != 1 or dim not in dropped]
    return factors.space([operand], [result], linear=MOVES)


def _unsqueeze(call: Call) -> Space:
    factors = Factors()
    operand = factors.dims(call.operands[0].shape)
    at = call.arg("dim") % call.result.ndim
    return factors.space([operand], [[*operand[:at], (), *operand[at:]]], linear=MOVES)


def _expand(call: Call) -> Space:
    """Return a space in which broadcast dims are factors of the result only: each rank makes its part."""
    shape, wide = call.operands[0].shape, call.result.shape
    factors = Factors()
    result = factors.dims(wide)
    new = len(wide) - len(shape)
    operand = [result[new + dim] if wide[new + dim] == size else () for dim, size in enumerate(shape)]
    return factors.space([operand], [result], linear=MOVES)


def _local_expand(call: LocalCall) -> Node:
    return remade(call, size=list(call.local_shape()))


def _repeat(call: Call) -> Space:
    shape, repeats = call.operands[0].shape, call.arg("repeats")
    new = len(repeats) - len(shape)
    factors = Factors()
    operand = factors.dims(shape)
    copies = [factors.one(f"r{dim}", count) for dim, count in enumerate(repeats)]
    result = [copies[dim] + (operand[dim - new] if dim >= new else ()) for dim in range(len(repeats))]
    return factors.space([operand], [result], linear=MOVES)


def _local_repeat(call: LocalCall) -> Node:
    shape, wide = tensor_of(call.operands[0]).shape, call.local_shape()
    padded = (1,) * (len(wide) - len(shape)) + tuple(shape)
    return remade(call, repeats=[length // size if size else 1 for length, size in zip(wide, padded, strict=True)])


def _unfold(call: Call) -> Space:
    """Return the space of sliding windows on one dim, which stays whole because windows share elements."""
    operand = call.operands[0]
    if not operand.ndim:
        return Factors().space([[]], [[()]], linear=MOVES)
    dim = call.arg("dimension") % operand.ndim
    factors = Factors()
    dims = factors.dims(operand.shape, blocked=(dim,))
    windows = factors.one("windows", call.result.shape[dim], blocked=True)
    inside = factors.one("inside", call.result.shape[-1], blocked=True)
    return factors.space([dims], [[*dims[:dim], windows, *dims[dim + 1 :], inside]], linear=MOVES)


def _along(name: str) -> SpaceOf:
    """Return the space of an op that reorders elements along the dims that argument `name` lists."""

    def space(call: Call) -> Space:
        operand = call.operands[0]
        factors = Factors()
        dims = factors.dims(operand.shape, blocked=whole_dims(call.arg(name), operand.ndim))
        return factors.space([dims], [dims], linear=MOVES)

    return space


def _triangle(call: Call) -> Space:
    """Return the space of `tril` and `triu`, which need their last two dims whole."""
    operand = call.operands[0]
    factors = Factors()
    dims = factors.dims(operand.shape, blocked=(operand.ndim - 2, operand.ndim - 1))
    return factors.space([dims], [dims], linear=MOVES)


def _view_as_real(call: Call) -> Space:
    factors = Factors()
    dims = factors.dims(call.operands[0].shape)
    return factors.space([dims], [[*dims, factors.one("parts", 2, blocked=True)]], linear=_COMPLEX)


def _view_as_complex(call: Call) -> Space:
    factors = Factors()
    dims = factors.dims(call.operands[0].shape, blocked=(call.result.ndim,))
    return factors.space([dims], [dims[:-1]], linear=_COMPLEX)


def _part(call: Call) -> Space:
    factors = Factors()
    dims = factors.dims(call.operands[0].shape)
    return factors.space([dims], [dims], linear=_COMPLEX)


def _opaque(call: Call) -> None:
    """Return None: strides do not say which dims a view has in common with its operand."""


_COMPLEX = (Linear((0,), ("sum", "avg")),)  # complex numbers have no order, and their product mixes the parts

register(
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view.default,
    space=_reshape,
    local=local_reshape,
)
register(aten.permute.default, space=_permute)
register(aten.transpose.int, space=_transpose)
register(aten.t.default, space=_t)
# By a reshape: a sharded dim may have one element on this rank, and `squeeze` would drop it.
register(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, space=_squeeze, local=local_reshape)
register(aten.unsqueeze.default, space=_unsqueeze)
register(aten.expand.default, space=_expand, local=_local_expand)
register(aten.repeat.default, space=_repeat, local=_local_repeat)
register(aten.unfold.default, space=_unfold)
register(aten.flip.default, prims.rev.default, aten.roll.default, space=_along("dims"))
register(aten.tril.default, aten.triu.default, space=_triangle)
register(aten.view_as_real.default, space=_view_as_real)
register(aten.view_as_complex.default, space=_view_as_complex)
register(aten.real.default, aten.imag.default, space=_part)
register(aten.as_strided.default, space=_opaque)
