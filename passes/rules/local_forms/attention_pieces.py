"""Cuts and joins of attention's per-device operands and results, which its local forms are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from passes.ir.call import Call
from passes.ir.graph import tensor_of
from passes.ir.layout import Layout, R, Shard
from passes.rules.rule import LocalCall

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

SEQUENCE = 2  # the dim of positions in queries, keys, values and the logsumexp
Pair = tuple[Node, Node]


@dataclass(frozen=True)
class Digit:
    """Axes that shard the queries: of each of `outer` blocks, cut into `ranks` pieces, this rank has one.

    Where `number // mirror` is odd, `number` being that of the block, ranks count backwards. If `mirror` is 1, a block and
    the next are a pair.
    """

    outer: int
    ranks: int
    coordinate: Node  # i64[1]
    places: Node  # 0, 1, ...: i64[ranks]
    mirror: int = 0
    follows: bool = False  # ranks also count backwards in the second block of the pair around this digit

    @property
    def spans(self) -> int:
        """Return how many blocks, or pairs of blocks, there are."""
        return self.outer // 2 if self.mirror == 1 else self.outer


@dataclass(frozen=True)
class Turned:
    """Two chunks of a pair of blocks that this rank has, and those of the ranks after it, each as a larger batch."""

    own: Pair
    others: Pair


def takes(call: LocalCall, name: str) -> bool:
    return has_argument(call.call, name)


def has_argument(call: Call, name: str) -> bool:
    return any(parameter.name == name for parameter in call.op._schema.arguments)


def is_masked(call: Call) -> bool:
    return any(has_argument(call, name) and call.arg(name) is not None for name in ("attn_mask", "attn_bias"))


def runs_in_blocks(call: Call) -> bool:
    """Return whether an attention is causal such that calls on blocks of queries and keys, with equal positions, make it."""
    if not call.arg("is_causal") or is_masked(call) or call.arg("query").shape[SEQUENCE] != call.arg("key").shape[SEQUENCE]:
        return False
    return has_argument(call, "logsumexp") or any("sumexp" in result.name for result in call.op._schema.returns)


def named(call: LocalCall, name: str) -> Node:
    """Return a per-device operand by its name in the schema."""
    positional = [p.name for p in call.call.op._schema.arguments if not p.kwarg_only]
    found = call.kwargs[name] if name in call.kwargs else call.args[positional.index(name)]
    assert isinstance(found, Node)
    return found


def operand(call: LocalCall, name: str) -> int:
    return call.operands.index(named(call, name))


def digits_of_queries(call: LocalCall, query: int) -> tuple[Digit, ...]:
    """Return the digits of the queries' positions, outermost first; none if the call does not run in blocks."""
    if not runs_in_blocks(call.call):
        return ()
    layout = call.operand_layout(query)
    return inner_digits(call, layout, layout.axes_on(SEQUENCE))


def inner_digits(call: LocalCall, layout: Layout, axes: tuple[int, ...], end: int = 1) -> tuple[Digit, ...]:
    """Return the digits of positions on `axes`, outermost first, inside of one block of `end` equal ones."""
    found = []
    for axes_together in together(call, layout, axes):
        first = layout.on(axes_together[0])
        assert isinstance(first, Shard)
        ranks, coordinate = joint_coordinate(call, axes_together)
        follows = bool(first.mirror) and first.half < end
        places = call.positions(Layout((R,) * call.mesh.ndim), 0, ranks)
        found.append(Digit(first.outer // end, ranks, coordinate, places, 0 if follows else first.mirror, follows))
        end = first.outer * ranks
    return tuple(found)


def together(call: LocalCall, layout: Layout, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the axes in groups: those that count as one mirrored digit are together."""
    groups: list[tuple[int, ...]] = []
    outer = mirror = 0  # of the digit that would go on
    for axis in axes:
        placement, ranks = layout.on(axis), call.mesh.sizes[axis]
        assert isinstance(placement, Shard)
        if placement.mirror and (placement.outer, placement.mirror) == (outer, mirror):
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
        outer, mirror = placement.outer * ranks, placement.mirror * ranks
    return tuple(groups)


def joint_coordinate(call: LocalCall, axes: tuple[int, ...]) -> tuple[int, Node]:
    """Return the number of ranks on several axes, and this rank's place among them: the last axis counts fastest."""
    ranks, coordinate = call.mesh.sizes[axes[0]], call.coordinate(axes[0])
    for axis in axes[1:]:
        before = call.emit(aten.mul.Tensor, coordinate, call.mesh.sizes[axis])
        coordinate = call.emit(aten.add.Tensor, before, call.coordinate(axis))
        ranks *= call.mesh.sizes[axis]
    return ranks, coordinate


class Pieces:
    """Cuts and joins of per-device values, which both directions need."""

    def __init__(self, call: LocalCall) -> None:
        self.call = call

    def cast(self, value: Node, dtype: torch.dtype) -> Node:
        return value if tensor_of(value).dtype == dtype else self.call.emit(convert, value, dtype)

    def wide(self, value: Node) -> Node:
        """Return a value in the dtype of sums."""
        dtype = torch.float64 if tensor_of(value).dtype == torch.float64 else torch.float32
        return self.cast(value, dtype)

    def sum(self, a: Node, b: Node) -> Node:
        return self.call.emit(aten.add.Tensor, a, b)

    def span(self, value: Node, start: int, end: int, dim: int = SEQUENCE) -> Node:
        whole = tensor_of(value).shape[dim] == end - start
        return value if whole else self.call.emit(aten.slice.Tensor, value, dim, start, end)

    def block(self, value: Node, number: int, of: int) -> Node:
        """Return one of `of` equal blocks of positions."""
        length = tensor_of(value).shape[SEQUENCE] // of
        return self.span(value, number * length, (number + 1) * length)

    def joined(self, values: list[Node], like: Node | None = None) -> Node:
        """Join positions. In memory, dims have the order of those of `like`, so that this needs no copy to be viewed as
        that is.
        """
        if len(values) == 1:
            return values[0]
        strides = (0,) if like is None else tensor_of(like).stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if order == [*range(len(strides))]:
            return self.call.emit(aten.cat.default, values, SEQUENCE)
        back = [order.index(dim) for dim in range(len(strides))]
        turned = [self.call.emit(aten.permute.default, value, order) for value in values]
        return self.call.emit(aten.permute.default, self.call.emit(aten.cat.default, turned, order.index(SEQUENCE)), back)

    def turned(self, block: Node, digit: Digit, *, backwards: bool = False) -> tuple[Node, Node]:
        """Return this rank's piece of a block, and the others in the order of the ranks after it, as a larger batch.

        With `backwards`, the first piece is that of the last rank.
        """
        shape = tensor_of(block).shape
        length = shape[2] // digit.ranks
        pieces = self.call.emit(aten.view.default, block, [*shape[:2], digit.ranks, length, shape[3]])
        order = self._modulo(self.call.emit(aten.add.Tensor, digit.places, digit.coordinate), digit.ranks)
        if backwards:
            order = self.call.emit(aten.rsub.Scalar, order, digit.ranks - 1)
        turned = self.call.emit_copy(aten.index_select.default, pieces, 2, order)
        others = self.call.emit(aten.permute.default, self.span(turned, 1, digit.ranks), [2, 0, 1, 3, 4])
        return self.call.emit(aten.select.int, turned, 2, 0), self._as_batch(others)

    def turned_back(self, own: Node, others: Node, digit: Digit, *, backwards: bool = False) -> Node:
        """Undo `turned`."""
        batch, heads, length, size = tensor_of(own).shape
        apart = self.call.emit(aten.permute.default, self.apart(others, digit), [1, 2, 0, 3, 4])
        turned = self.call.emit(aten.cat.default, [self.call.emit(aten.unsqueeze.default, own, 2), apart], 2)
        place = self.call.emit(aten.rsub.Scalar, digit.places, digit.ranks - 1) if backwards else digit.places
        order = self._modulo(self.call.emit(aten.sub.Tensor, place, digit.coordinate), digit.ranks)
        pieces = self.call.emit_copy(aten.index_select.default, turned, 2, order)
        return self.call.emit(aten.view.default, pieces, [batch, heads, digit.ranks * length, size])

    def repeated(self, value: Node, digit: Digit) -> Node:
        """Return queries (or what has their positions) once for each other piece, as a larger batch."""
        if digit.ranks == 2:
            return value
        shape = [digit.ranks - 1, *tensor_of(value).shape]
        return self._as_batch(self.call.emit(aten.expand.default, self.call.emit(aten.unsqueeze.default, value, 0), shape))

    def apart(self, value: Node, digit: Digit) -> Node:
        """Return a larger batch with the other pieces as dim 0."""
        batch, *rest = tensor_of(value).shape
        return self.call.emit(aten.view.default, self.dense(value), [digit.ranks - 1, batch // (digit.ranks - 1), *rest])

    def later(self, digit: Digit, ndim: int) -> Node:
        """Return a mask, true for each other piece that comes after this rank's own, which broadcasts to `apart`."""
        place = self.span(digit.places, 1, digit.ranks, dim=0)
        late = self.call.emit(aten.lt.Scalar, self.call.emit(aten.add.Tensor, place, digit.coordinate), digit.ranks)
        return self.call.emit(aten.view.default, late, [-1] + [1] * (ndim - 1))

    def without_later(self, value: Node, digit: Digit, fill: float, *, keep: bool = False) -> Node:
        """Return what calls with the other pieces gave, those after this rank's own replaced by `fill`: dim 0 is the
        piece. With `keep`, the others are replaced.
        """
        apart = self.apart(value, digit)
        mask = self.later(digit, tensor_of(apart).dim())
        mask = self.call.emit(aten.logical_not.default, mask) if keep else mask
        return self.call.emit(aten.masked_fill.Scalar, apart, mask, fill)

    def halves(self, value: Node) -> Pair:
        return self.block(value, 0, 2), self.block(value, 1, 2)

    def turned_pair(self, blocks: Node, digit: Digit) -> Turned:
        """Return `turned` of two blocks, in the second of which ranks count backwards."""
        ends = [self.turned(one, digit, backwards=i > 0) for i, one in enumerate(self.halves(blocks))]
        return Turned((ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]))

    def picked(self, chunks: Pair, digit: Digit) -> Node:
        """Return, of each pair that another rank has, the chunk that comes before this rank's in the same half."""
        first, second = (self.apart(one, digit) for one in chunks)
        late = self.later(digit, tensor_of(first).dim())
        return self._as_batch(self.call.emit_copy(aten.where.self, late, second, first))

    def picked_queries(self, chunks: Pair, digit: Digit) -> Node:
        """Return, for each pair that another rank has, the chunk of this rank that attends to the one that is `picked`."""
        first, second = (self.call.emit(aten.unsqueeze.default, one, 0) for one in chunks)
        late = self.later(digit, tensor_of(first).dim())
        return self._as_batch(self.call.emit_copy(aten.where.self, late, second, first))

    def as_batch(self, chunks: Pair) -> Node:
        return self.call.emit_copy(aten.cat.default, list(chunks), 0)

    def of_batch(self, value: Node) -> Pair:
        """Undo `as_batch`."""
        batch = tensor_of(value).shape[0] // 2
        return self.span(value, 0, batch, dim=0), self.span(value, batch, 2 * batch, dim=0)

    def of_block(self, digit: Digit, number: int) -> Digit:
        """Return a digit as it counts in one block."""
        return self._backwards(digit) if digit.mirror and number // digit.mirror % 2 else digit

    def after_half(self, digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
        """Return digits as they count in the second block of the pair around them."""
        return tuple(self._backwards(digit) if digit.follows else digit for digit in digits)

    def _backwards(self, digit: Digit) -> Digit:
        return replace(digit, coordinate=self.call.emit(aten.rsub.Scalar, digit.coordinate, digit.ranks - 1))

    def _modulo(self, places: Node, ranks: int) -> Node:
        return self.call.emit(aten.remainder.Scalar, places, ranks)

    def _as_batch(self, value: Node) -> Node:
        pieces, batch, *rest = tensor_of(value).shape
        return self.call.emit(aten.view.default, self.dense(value), [pieces * batch, *rest])

    def dense(self, value: Node) -> Node:
        if tensor_of(value).is_contiguous():
            return value
        return self.call.emit_copy(aten.clone.default, value, memory_format=torch.contiguous_format)
