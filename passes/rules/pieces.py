"""Sharding rules of ops that take pieces of a dim (`slice`, `split`), or join pieces (`cat`, `stack`).

A piece that is one of `k` equal parts of a dim is that dim's inner digit. So a fused projection stays sharded, each of
its parts by itself, through slices and concatenation. Any other piece needs the dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from passes.ir.call import Call
from passes.ir.graph import tensor_of
from passes.ir.layout import PARTIAL_OPS
from passes.rules.factors import Dim, Factors
from passes.rules.rule import Linear, LocalCall, Space, register, remade

aten = torch.ops.aten

Shape = tuple[int, ...]

MOVES = (Linear((0,), PARTIAL_OPS),)
MOVES_BOTH = (Linear((0, 1), PARTIAL_OPS),)


def _slice(call: Call) -> Space:
    factors = Factors()
    whole, piece = _window(call, factors, call.operands[0].shape, call.result.shape)
    return factors.space([whole], [piece], linear=MOVES)


def _slice_scatter(call: Call) -> Space:
    factors = Factors()
    whole, piece = _window(call, factors, call.operands[0].shape, call.operands[1].shape)
    return factors.space([whole, piece], [whole], linear=MOVES_BOTH)


def _slice_backward(call: Call) -> Space:
    factors = Factors()
    whole, piece = _window(call, factors, call.result.shape, call.operands[0].shape)
    return factors.space([piece], [whole], linear=MOVES)


def _window(call: Call, factors: Factors, whole: Shape, piece: Shape) -> tuple[list[Dim], list[Dim]]:
    """Return the dims of a tensor and of a slice of it, in shared factors."""
    dim = call.arg("dim") % len(whole)
    start, step = _start(call.arg("start"), whole[dim]), call.arg("step")
    pair = _part(factors, whole[dim], piece[dim], start, step)
    return _with(factors, whole, dim, pair[0]), _with(factors, whole, dim, pair[1])


def _start(start: int | None, whole: int) -> int:
    start = start or 0
    return min(max(start + whole if start < 0 else start, 0), whole)


def _part(factors: Factors, whole: int, piece: int, start: int, step: int) -> tuple[Dim, Dim]:
    if piece == whole:
        kept = factors.one("piece", whole)
        return kept, kept
    if step == 1 and piece and whole % piece == 0 and start % piece == 0:
        inner = factors.one("piece", piece)
        return factors.one("parts", whole // piece, blocked=True) + inner, inner
    if step > 1 and piece * step == whole:  # every step-th element
        outer = factors.one("piece", piece)
        return outer + factors.one("steps", step, blocked=True), outer
    return factors.one("whole", whole, blocked=True), factors.one("piece", piece, blocked=True)


def _with(factors: Factors, shape: Sequence[int], dim: int, there: Dim) -> list[Dim]:
    """Return the factors of `shape`, with the given ones for `dim`."""
    return [there if at == dim else factors.one(f"d{at}", size) for at, size in enumerate(shape)]


def _local_slice(call: LocalCall) -> Node:
    whole, piece = call.call.operands[0].shape, call.call.result.shape
    return remade(call, **_local_window(call, whole, piece, call.local_shape()))


def _local_slice_scatter(call: LocalCall) -> Node:
    whole, piece = (operand.shape for operand in call.call.operands)
    return remade(call, **_local_window(call, whole, piece, tensor_of(call.operands[1]).shape))


def _local_slice_backward(call: LocalCall) -> Node:
    whole, piece = call.call.result.shape, call.call.operands[0].shape
    window = _local_window(call, whole, piece, tensor_of(call.operands[0]).shape)
    return remade(call, input_sizes=list(call.local_shape()), **window)


def _local_window(call: LocalCall, whole: Shape, piece: Shape, local: Shape) -> dict[str, int]:
    """Return the bounds of this rank's slice, `local` being its per-device shape; {} if the dim is not sharded."""
    dim = call.call.arg("dim") % len(whole)
    if local[dim] == piece[dim]:
        return {}
    start, step = _start(call.call.arg("start"), whole[dim]), call.call.arg("step")
    start = start // piece[dim] * local[dim] if step == 1 else start
    return {"start": start, "end": start + step * (local[dim] - 1) + 1}


def _select(call: Call) -> Space:
    return _slot(call, call.operands[0].shape, takes=True)


def _select_backward(call: Call) -> Space:
    return _slot(call, call.result.shape, takes=False)


def _slot(call: Call, shape: Shape, *, takes: bool) -> Space:
    dim = call.arg("dim") % len(shape)
    factors = Factors()
    whole = factors.dims(shape, blocked=(dim,))
    slot = whole[:dim] + whole[dim + 1 :]
    return factors.space([whole if takes else slot], [slot if takes else whole], linear=MOVES)


def _select_scatter(call: Call) -> Space:
    dim = call.arg("dim") % call.result.ndim
    factors = Factors()
    whole = factors.dims(call.result.shape, blocked=(dim,))
    return factors.space([whole, whole[:dim] + whole[dim + 1 :]], [whole], linear=MOVES_BOTH)


def _local_select_backward(call: LocalCall) -> Node:
    return remade(call, input_sizes=list(call.local_shape()))


def _split(call: Call) -> Space:
    shape = call.operands[0].shape
    dim = call.arg("dim") % len(shape)
    factors = Factors()
    whole, pieces = _joined(factors, shape[dim], [result.shape[dim] for result in call.results])
    results = [_with(factors, shape, dim, piece) for piece in pieces]
    return factors.space([_with(factors, shape, dim, whole)], results, linear=MOVES)


def _joined(factors: Factors, whole: int, pieces: list[int]) -> tuple[Dim, list[Dim]]:
    """Return the factors of a dim and of its consecutive pieces, shared if the pieces are equal."""
    if len(set(pieces)) == 1 and pieces[0] * len(pieces) == whole:
        piece = factors.one("piece", pieces[0])
        return factors.one("parts", len(pieces), blocked=True) + piece, [piece] * len(pieces)
    names = [factors.one(f"piece{i}", size, blocked=True) for i, size in enumerate(pieces)]
    return factors.one("whole", whole, blocked=True), names


def _local_split(call: LocalCall) -> Node:
    dim = call.call.arg("dim") % call.call.result.ndim
    return remade(call, split_size=call.local_shape()[dim])


def _local_split_with_sizes(call: LocalCall) -> Node:
    dim = call.call.arg("dim") % call.call.result.ndim
    return remade(call, split_sizes=[call.local_shape(i)[dim] for i in range(len(call.call.results))])


def _unbind(call: Call) -> Space:
    shape = call.operands[0].shape
    dim = call.arg("dim") % len(shape)
    factors = Factors()
    whole = factors.dims(shape, blocked=(dim,))
    return factors.space([whole], [whole[:dim] + whole[dim + 1 :]] * len(call.results), linear=MOVES)


def _glu(call: Call) -> Space:
    """Return a space in which each half of `dim` is sharded by itself."""
    shape, result = call.operands[0].shape, call.result.shape
    dim = call.arg("dim") % len(shape)
    factors = Factors()
    piece = factors.one("piece", result[dim])
    half = factors.one("parts", 2, blocked=True)
    return factors.space([_with(factors, shape, dim, half + piece)], [_with(factors, result, dim, piece)])


def _cat(call: Call) -> Space | None:
    shape, operands = call.result.shape, call.operands
    if any(operand.ndim != len(shape) for operand in operands):  # `cat` ignores empty tensors of another ndim
        return None
    dim = call.arg("dim") % len(shape)
    factors = Factors()
    whole, pieces = _joined(factors, shape[dim], [operand.shape[dim] for operand in operands])
    dims = [_with(factors, shape, dim, piece) for piece in pieces]
    return factors.space(dims, [_with(factors, shape, dim, whole)], linear=_together(call))


def _stack(call: Call) -> Space:
    shape = call.result.shape
    dim = call.arg("dim") % len(shape)
    factors = Factors()
    result = factors.dims(shape, blocked=(dim,))
    each = result[:dim] + result[dim + 1 :]
    return factors.space([each] * len(call.operands), [result], linear=_together(call))


def _together(call: Call) -> tuple[Linear, ...]:
    return (Linear(tuple(range(len(call.operands))), PARTIAL_OPS),)


def _pad(call: Call) -> Space:
    """Return a space in which padded or cropped dims stay whole. Sums pass only a padding with 0."""
    shape, pad, value = call.operands[0].shape, call.arg("pad"), call.arg("value")
    changed = [len(shape) - 1 - i // 2 for i, count in enumerate(pad) if count]
    factors = Factors()
    operand = factors.dims(shape, blocked=changed)
    result = [
        factors.one(f"padded{dim}", size, blocked=True) if dim in changed else operand[dim]
        for dim, size in enumerate(call.result.shape)
    ]
    ops = PARTIAL_OPS if value == 0 else ("max", "min", "avg")
    return factors.space([operand], [result], linear=(Linear((0,), ops),))


register(aten.slice.Tensor, space=_slice, local=_local_slice)
register(aten.slice_scatter.default, space=_slice_scatter, local=_local_slice_scatter)
register(aten.slice_backward.default, space=_slice_backward, local=_local_slice_backward)
register(aten.select.int, space=_select)
register(aten.select_scatter.default, space=_select_scatter)
register(aten.select_backward.default, space=_select_backward, local=_local_select_backward)
register(aten.split.Tensor, space=_split, local=_local_split)
register(aten.split_with_sizes.default, space=_split, local=_local_split_with_sizes)
register(aten.unbind.int, space=_unbind)
register(aten.glu.default, space=_glu)
register(aten.cat.default, space=_cat)
register(aten.stack.default, space=_stack)
register(aten.constant_pad_nd.default, space=_pad)
