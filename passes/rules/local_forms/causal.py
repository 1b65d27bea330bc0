"""Local forms of causal attention whose queries are sharded on the sequence; keys and values are whole.

A rank's queries are pieces of the sequence, one in each of `outer` equal blocks (`S(2)`: one block, `S(2/4)`: four). A piece
attends to

1. all blocks before its own: one call without a mask,
2. its own keys: a causal call of equal lengths,
3. the other pieces of its block: one call without a mask, in a batch. Results of pieces that come later are dropped.

So every rank makes the same calls, of the same shapes, whatever its coordinate, and no kernel needs a mask or an alignment
of unequal lengths. More blocks drop less: of the keys that all queries could see, `1 + 1/outer - 1/(outer * n)` halves are
computed. Results are merged by their logsumexp, in float32, or float64 for float64. The kernels' backward takes the merged
result, so that gradients are sums over the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.ir.layout import Layout, R, Shard
from passes.rules.rule import LocalCall, remade

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

_SEQUENCE = 2  # the dim of positions in queries, keys, values and the logsumexp
Pair = tuple[Node, Node]


@dataclass(frozen=True)
class _Digit:
    """One axis that shards the queries: of each of `outer` blocks, cut into `ranks` pieces, this rank has one."""

    outer: int
    ranks: int
    coordinate: Node  # i64[1]
    places: Node  # 0, 1, ...: i64[ranks]


def causal_forward(call: LocalCall) -> tuple[Node, ...] | None:
    """Return `(out, logsumexp, seeds and sizes ...)` of this rank's queries."""
    digits = _digits(call, _operand(call, "query"))
    if not digits:
        return None
    query, key, value = (_named(call, name) for name in ("query", "key", "value"))
    forward = _Forward(call)
    out, logsumexp = forward.attend(query, (key, value), digits)
    others = tuple(call.item(forward.plain[-1], i) for i in range(2, forward.count))
    return forward.cast(out, tensor_of(query).dtype), logsumexp, *others


def causal_backward(call: LocalCall) -> tuple[Node, ...] | None:
    """Return the gradients of this rank's queries, and this rank's terms of those of all keys and values."""
    digits = _digits(call, _operand(call, "query"))
    if not digits:
        return None
    grad = "grad_out" if _takes(call, "grad_out") else "grad_out_"
    side = {name: _named(call, name) for name in (grad, "query", "out", "logsumexp")}
    keys = _named(call, "key"), _named(call, "value")
    backward = _Backward(call)
    grads = backward.grads(side, keys, digits)
    dtype = tensor_of(side["query"]).dtype
    return tuple(backward.cast(one, dtype) for one in grads)


def _takes(call: LocalCall, name: str) -> bool:
    return any(parameter.name == name for parameter in call.call.op._schema.arguments)


def _named(call: LocalCall, name: str) -> Node:
    """Return a per-device operand by its name in the schema."""
    positional = [p.name for p in call.call.op._schema.arguments if not p.kwarg_only]
    found = call.kwargs[name] if name in call.kwargs else call.args[positional.index(name)]
    assert isinstance(found, Node)
    return found


def _operand(call: LocalCall, name: str) -> int:
    return call.operands.index(_named(call, name))


def _digits(call: LocalCall, query: int) -> tuple[_Digit, ...]:
    """Return the digits of the queries' positions, outermost first; none if the call is not causal."""
    if not call.call.arg("is_causal"):
        return ()
    layout, found, end = call.operand_layout(query), [], 1
    for axis in layout.axes_on(_SEQUENCE):
        placement, ranks = layout.on(axis), call.mesh.sizes[axis]
        assert isinstance(placement, Shard)
        places = call.positions(Layout((R,) * call.mesh.ndim), 0, ranks)
        found.append(_Digit(placement.outer // end, ranks, call.coordinate(axis), places))
        end = placement.outer * ranks
    return tuple(found)


class _Pieces:
    """Cuts and joins of per-device values, which both directions need."""

    def __init__(self, call: LocalCall) -> None:
        self.call = call

    def cast(self, value: Node, dtype: torch.dtype) -> Node:
        return value if tensor_of(value).dtype == dtype else self.call.emit(convert, value, dtype)

    def wide(self, value: Node) -> Node:
        """Return a value in the dtype of sums."""
        dtype = torch.float64 if tensor_of(value).dtype == torch.float64 else torch.float32
        return self.cast(value, dtype)

    def span(self, value: Node, start: int, end: int, dim: int = _SEQUENCE) -> Node:
        whole = tensor_of(value).shape[dim] == end - start
        return value if whole else self.call.emit(aten.slice.Tensor, value, dim, start, end)

    def block(self, value: Node, number: int, of: int) -> Node:
        """Return one of `of` equal blocks of positions."""
        length = tensor_of(value).shape[_SEQUENCE] // of
        return self.span(value, number * length, (number + 1) * length)

    def joined(self, values: list[Node]) -> Node:
        return values[0] if len(values) == 1 else self.call.emit(aten.cat.default, values, _SEQUENCE)

    def turned(self, block: Node, digit: _Digit) -> tuple[Node, Node]:
        """Return this rank's piece of a block, and the others in the order of the ranks after it, as a larger batch."""
        shape = tensor_of(block).shape
        length = shape[2] // digit.ranks
        pieces = self.call.emit(aten.view.default, block, [*shape[:2], digit.ranks, length, shape[3]])
        order = self._modulo(self.call.emit(aten.add.Tensor, digit.places, digit.coordinate), digit.ranks)
        turned = self.call.emit(aten.index_select.default, pieces, 2, order)
        others = self.call.emit(aten.permute.default, self.span(turned, 1, digit.ranks), [2, 0, 1, 3, 4])
        return self.call.emit(aten.select.int, turned, 2, 0), self._as_batch(others)

    def turned_back(self, own: Node, others: Node, digit: _Digit) -> Node:
        """Undo `turned`."""
        batch, heads, length, size = tensor_of(own).shape
        apart = self.call.emit(aten.permute.default, self.apart(others, digit), [1, 2, 0, 3, 4])
        turned = self.call.emit(aten.cat.default, [self.call.emit(aten.unsqueeze.default, own, 2), apart], 2)
        order = self._modulo(self.call.emit(aten.sub.Tensor, digit.places, digit.coordinate), digit.ranks)
        pieces = self.call.emit(aten.index_select.default, turned, 2, order)
        return self.call.emit(aten.view.default, pieces, [batch, heads, digit.ranks * length, size])

    def repeated(self, value: Node, digit: _Digit) -> Node:
        """Return queries (or what has their positions) once for each other piece, as a larger batch."""
        if digit.ranks == 2:
            return value
        shape = [digit.ranks - 1, *tensor_of(value).shape]
        return self._as_batch(self.call.emit(aten.expand.default, self.call.emit(aten.unsqueeze.default, value, 0), shape))

    def apart(self, value: Node, digit: _Digit) -> Node:
        """Return a larger batch with the other pieces as dim 0."""
        batch, *rest = tensor_of(value).shape
        return self.call.emit(aten.view.default, self._dense(value), [digit.ranks - 1, batch // (digit.ranks - 1), *rest])

    def later(self, digit: _Digit, ndim: int) -> Node:
        """Return a mask, true for each other piece that comes after this rank's own, which broadcasts to `apart`."""
        place = self.span(digit.places, 1, digit.ranks, dim=0)
        late = self.call.emit(aten.lt.Scalar, self.call.emit(aten.add.Tensor, place, digit.coordinate), digit.ranks)
        return self.call.emit(aten.view.default, late, [-1] + [1] * (ndim - 1))

    def without_later(self, value: Node, digit: _Digit, fill: float) -> Node:
        """Return what calls with the other pieces gave, those after this rank's own replaced by `fill`: dim 0 is the
        piece."""
        apart = self.apart(value, digit)
        return self.call.emit(aten.masked_fill.Scalar, apart, self.later(digit, tensor_of(apart).dim()), fill)

    def _modulo(self, places: Node, ranks: int) -> Node:
        return self.call.emit(aten.remainder.Scalar, places, ranks)

    def _as_batch(self, value: Node) -> Node:
        pieces, batch, *rest = tensor_of(value).shape
        return self.call.emit(aten.view.default, self._dense(value), [pieces * batch, *rest])

    def _dense(self, value: Node) -> Node:
        if tensor_of(value).is_contiguous():
            return value
        return self.call.emit(aten.clone.default, value, memory_format=torch.contiguous_format)


class _Forward(_Pieces):
    """The calls of a forward. Results are `(out, logsumexp)` in the dtype of sums."""

    def __init__(self, call: LocalCall) -> None:
        super().__init__(call)
        self.plain: list[Node] = []  # calls of the kernel
        self.count = len(call.call.op._schema.returns)

    def attend(self, query: Node, keys: Pair, digits: tuple[_Digit, ...]) -> Pair:
        if not digits:
            return self._kernel(query, keys, is_causal=True)
        found = [self._piece(query, keys, number, digits) for number in range(digits[0].outer)]
        outs, logsumexps = zip(*found, strict=True)
        return self.joined(list(outs)), self.joined(list(logsumexps))

    def _piece(self, query: Node, keys: Pair, number: int, digits: tuple[_Digit, ...]) -> Pair:
        digit, *rest = digits
        piece = self.block(query, number, digit.outer)
        turned = [self.turned(self.block(one, number, digit.outer), digit) for one in keys]
        own = self.attend(piece, (turned[0][0], turned[1][0]), tuple(rest))
        others = self._kernel(self.repeated(piece, digit), (turned[0][1], turned[1][1]), is_causal=False)
        parts = [self._one(own), (self.apart(others[0], digit), self.without_later(others[1], digit, -torch.inf))]
        if number:
            before = number * tensor_of(keys[0]).shape[_SEQUENCE] // digit.outer
            earlier = self.span(keys[0], 0, before), self.span(keys[1], 0, before)
            parts.append(self._one(self._kernel(piece, earlier, is_causal=False)))
        return self._merged(parts)

    def _kernel(self, query: Node, keys: Pair, *, is_causal: bool) -> Pair:
        made = remade(self.call, query=query, key=keys[0], value=keys[1], is_causal=is_causal)
        self.plain.append(made)
        return self.wide(self.call.item(made, 0)), self.call.item(made, 1)

    def _one(self, part: Pair) -> Pair:
        return self.call.emit(aten.unsqueeze.default, part[0], 0), self.call.emit(aten.unsqueeze.default, part[1], 0)

    def _merged(self, parts: list[Pair]) -> Pair:
        """Merge results over disjoint keys, stacked on dim 0."""
        emit = self.call.emit
        outs, logsumexps = (emit(aten.cat.default, list(column), 0) for column in zip(*parts, strict=True))
        top = emit(aten.amax.default, logsumexps, [0])
        weights = emit(aten.exp.default, emit(aten.sub.Tensor, logsumexps, top))
        total = emit(aten.sum.dim_IntList, weights, [0])
        shares = emit(aten.div.Tensor, weights, total)
        if tensor_of(shares).dim() < tensor_of(outs).dim():  # cuDNN's logsumexp has a last dim of size 1
            shares = emit(aten.unsqueeze.default, shares, -1)
        out = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, outs, shares), [0])
        return out, emit(aten.add.Tensor, top, emit(aten.log.default, total))


class _Backward(_Pieces):
    """The calls of a backward. `side` holds what has the queries' positions, by name; sums are in a wide dtype."""

    def grads(self, side: dict[str, Node], keys: Pair, digits: tuple[_Digit, ...]) -> tuple[Node, ...]:
        """Return the gradients of queries, keys and values."""
        if not digits:
            return self._kernel(side, keys, is_causal=True)
        of_queries: list[Node] = []
        of_keys: tuple[list[Node], ...] = ([], [])  # by block
        for number in range(digits[0].outer):
            of_queries.append(self._piece(side, keys, number, digits, of_keys))
        return self.joined(of_queries), *(self.joined(blocks) for blocks in of_keys)

    def _piece(
        self, side: dict[str, Node], keys: Pair, number: int, digits: tuple[_Digit, ...], of_keys: tuple[list[Node], ...]
    ) -> Node:
        """Return the gradient of one piece of queries; add its terms to the gradients of keys and values."""
        digit, *rest = digits
        piece = {name: self.block(one, number, digit.outer) for name, one in side.items()}
        turned = [self.turned(self.block(one, number, digit.outer), digit) for one in keys]
        grad, *own = self.grads(piece, (turned[0][0], turned[1][0]), tuple(rest))
        repeated = {name: self.repeated(one, digit) for name, one in piece.items()}
        other, *others = self._kernel(repeated, (turned[0][1], turned[1][1]), is_causal=False)
        grad = self._sum(grad, self.call.emit(aten.sum.dim_IntList, self.without_later(other, digit, 0.0), [0]))
        for blocks, one, rest_of in zip(of_keys, own, others, strict=True):
            kept = self._as_batch(self.without_later(rest_of, digit, 0.0))
            blocks.append(self.turned_back(one, kept, digit))
        if number:
            before = number * tensor_of(keys[0]).shape[_SEQUENCE] // digit.outer
            earlier = self.span(keys[0], 0, before), self.span(keys[1], 0, before)
            seen, *terms = self._kernel(piece, earlier, is_causal=False)
            grad = self._sum(grad, seen)
            for blocks, term in zip(of_keys, terms, strict=True):
                for i in range(number):
                    blocks[i] = self._sum(blocks[i], self.block(term, i, number))
        return grad

    def _kernel(self, side: dict[str, Node], keys: Pair, *, is_causal: bool) -> tuple[Node, ...]:
        lengths: dict[str, Any] = {}
        if _takes(self.call, "max_q"):
            lengths = {"max_q": tensor_of(side["query"]).shape[2], "max_k": tensor_of(keys[0]).shape[2]}
        made = remade(self.call, **side, key=keys[0], value=keys[1], is_causal=is_causal, **lengths)
        return tuple(self.wide(self.call.item(made, i)) for i in range(3))

    def _sum(self, a: Node, b: Node) -> Node:
        return self.call.emit(aten.add.Tensor, a, b)
