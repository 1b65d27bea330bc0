"""Local forms of causal attention whose queries are sharded on the sequence; keys and values are whole.

`S(2~)` gives a rank two chunks of the sequence of 2 n: chunk c, its first, and chunk 2 n - 1 - c, its second. They attend

1. each to its own keys: causal calls of equal lengths,
2. the second to all chunks of the first half: one call without a mask,
3. to n - 1 chunks more, in a batch: of each pair that another rank has, the first chunk comes before this rank's first, or
   the second before this rank's second. Which of them decides, by a `where`, whose queries and keys take part.

So every rank makes the same calls, of the same shapes, whatever its coordinate, no kernel needs a mask or an alignment of
unequal lengths, and no pair of a query and a key is computed in vain, but for those of step 1.

Of a contiguous piece, `S(2)`, or of pieces in several blocks, `S(2/4)`, each attends to its own keys; to all blocks before its
own; and to the other pieces of its block, in a batch, of which those that come later are dropped.

Results are merged by their logsumexp, in float32, or float64 for float64. The kernels' backward takes the merged result, so
that gradients are sums over the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.rules.local_forms.attention_pieces import (
    SEQUENCE,
    Digit,
    Pair,
    Pieces,
    digits_of_queries,
    named,
    operand,
    takes,
)
from passes.rules.rule import LocalCall, remade

aten = torch.ops.aten

Side = dict[str, Node]  # what has the queries' positions, by name


def causal_forward(call: LocalCall) -> tuple[Node, ...] | None:
    """Return `(out, logsumexp, seeds and sizes ...)` of this rank's queries."""
    digits = digits_of_queries(call, operand(call, "query"))
    if not digits:
        return None
    query, key, value = (named(call, name) for name in ("query", "key", "value"))
    forward = CausalForward(call)
    out, logsumexp = forward.attend(query, (key, value), digits)
    others = tuple(call.item(forward.plain[-1], i) for i in range(2, forward.count))
    return forward.cast(out, tensor_of(query).dtype), logsumexp, *others


def causal_backward(call: LocalCall) -> tuple[Node, ...] | None:
    """Return the gradients of this rank's queries, and this rank's terms of those of all keys and values."""
    digits = digits_of_queries(call, operand(call, "query"))
    if not digits:
        return None
    grad = "grad_out" if takes(call, "grad_out") else "grad_out_"
    side = {name: named(call, name) for name in (grad, "query", "out", "logsumexp")}
    keys = named(call, "key"), named(call, "value")
    backward = CausalBackward(call)
    grads = backward.grads(side, keys, digits)
    dtype = tensor_of(side["query"]).dtype
    return tuple(backward.cast(one, dtype) for one in grads)


class CausalForward(Pieces):
    """The calls of a forward. Results are `(out, logsumexp)` in the dtype of sums."""

    def __init__(self, call: LocalCall) -> None:
        super().__init__(call)
        self.plain: list[Node] = []  # calls of the kernel
        self.count = len(call.call.op._schema.returns)

    def attend(self, query: Node, keys: Pair, digits: tuple[Digit, ...]) -> Pair:
        if not digits:
            return self.kernel(query, keys, is_causal=True)
        digit, *rest = digits
        found: list[Pair] = []
        for number in range(digit.spans):
            queries = self.block(query, number, digit.spans)
            held = self.block(keys[0], number, digit.spans), self.block(keys[1], number, digit.spans)
            earlier = None if number == 0 else self._earlier(queries, keys, number, digit.spans)
            if digit.mirror == 1:
                found += self._pair(queries, held, digit, tuple(rest), earlier)
            else:
                found.append(self._piece(queries, held, self.of_block(digit, number), tuple(rest), earlier))
        outs, logsumexps = zip(*found, strict=True)
        return self.joined(list(outs), like=query), self.joined(list(logsumexps))

    def _earlier(self, queries: Node, keys: Pair, number: int, spans: int) -> Pair:
        end = number * tensor_of(keys[0]).shape[SEQUENCE] // spans
        return self.kernel(queries, (self.span(keys[0], 0, end), self.span(keys[1], 0, end)), is_causal=False)

    def _piece(self, piece: Node, keys: Pair, digit: Digit, rest: tuple[Digit, ...], earlier: Pair | None) -> Pair:
        """Return the result of this rank's piece of a block; `keys` are those of the block."""
        turned = [self.turned(one, digit) for one in keys]
        own = self.attend(piece, (turned[0][0], turned[1][0]), rest)
        others = self.kernel(self.repeated(piece, digit), (turned[0][1], turned[1][1]), is_causal=False)
        parts = [self._one(own), (self.apart(others[0], digit), self.without_later(others[1], digit, -torch.inf))]
        return self._merged(parts + ([] if earlier is None else [self._one(earlier)]))

    def _pair(
        self, chunks: Node, keys: Pair, digit: Digit, rest: tuple[Digit, ...], earlier: Pair | None
    ) -> tuple[Pair, Pair]:
        """Return the results of this rank's two chunks of a pair of blocks; `keys` are those of the pair."""
        queries, first = self.halves(chunks), (self.halves(keys[0])[0], self.halves(keys[1])[0])
        turned = [self.turned_pair(one, digit) for one in keys]
        own = self.attend_each(queries, tuple(one.own for one in turned), rest)
        half = self.kernel(queries[1], first, is_causal=False)
        picked = [self.picked(one.others, digit) for one in turned]
        others = self.kernel(self.picked_queries(queries, digit), (picked[0], picked[1]), is_causal=False)
        apart = self.apart(others[0], digit)
        parts = [
            [self._one(own[0]), (apart, self.without_later(others[1], digit, -torch.inf))],
            [self._one(own[1]), (apart, self.without_later(others[1], digit, -torch.inf, keep=True)), self._one(half)],
        ]
        if earlier is not None:
            ends = zip(*map(self.halves, earlier), strict=True)
            parts = [[*some, self._one(end)] for some, end in zip(parts, ends, strict=True)]
        return self._merged(parts[0]), self._merged(parts[1])

    def attend_each(self, queries: Pair, keys: Sequence[Pair], digits: tuple[Digit, ...]) -> tuple[Pair, Pair]:
        """Let each of a rank's two chunks attend to its own keys: in one call, unless other axes cut them further."""
        if digits:
            ends = zip(queries, *keys, (digits, self.after_half(digits)), strict=True)
            first, second = (self.attend(query, (key, value), inner) for query, key, value, inner in ends)
            return first, second
        both = self.kernel(self.as_batch(queries), (self.as_batch(keys[0]), self.as_batch(keys[1])), is_causal=True)
        outs, logsumexps = (self.of_batch(one) for one in both)
        return (outs[0], logsumexps[0]), (outs[1], logsumexps[1])

    def kernel(self, query: Node, keys: Pair, *, is_causal: bool, **changes: Any) -> Pair:
        made = remade(self.call, query=query, key=keys[0], value=keys[1], is_causal=is_causal, **changes)
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


class CausalBackward(Pieces):
    """The calls of a backward. `side` holds what has the queries' positions, by name; sums are in a wide dtype."""

    def grads(self, side: Side, keys: Pair, digits: tuple[Digit, ...]) -> tuple[Node, ...]:
        """Return the gradients of queries, keys and values."""
        if not digits:
            return self.kernel(side, keys, is_causal=True)
        digit, *rest = digits
        of_queries: list[Node] = []
        of_keys: tuple[list[Node], ...] = ([], [])  # by block, or pair of blocks
        for number in range(digit.spans):
            queries = {name: self.block(one, number, digit.spans) for name, one in side.items()}
            held = self.block(keys[0], number, digit.spans), self.block(keys[1], number, digit.spans)
            if digit.mirror == 1:
                grad, *own = self._pair(queries, held, digit, tuple(rest))
            else:
                grad, *own = self._piece(queries, held, self.of_block(digit, number), tuple(rest))
            for blocks, one in zip(of_keys, own, strict=True):
                blocks.append(one)
            of_queries.append(self._with_earlier(grad, queries, keys, of_keys, number, digit.spans))
        return self.joined(of_queries, like=side["query"]), *(self.joined(blocks) for blocks in of_keys)

    def _with_earlier(
        self, grad: Node, queries: Side, keys: Pair, of_keys: tuple[list[Node], ...], number: int, spans: int
    ) -> Node:
        """Return the gradient of queries with the term of the blocks before their own; add to those of keys and values."""
        if not number:
            return grad
        end = number * tensor_of(keys[0]).shape[SEQUENCE] // spans
        seen, *terms = self.kernel(queries, (self.span(keys[0], 0, end), self.span(keys[1], 0, end)), is_causal=False)
        for blocks, term in zip(of_keys, terms, strict=True):
            for i in range(number):
                blocks[i] = self.sum(blocks[i], self.block(term, i, number))
        return self.sum(grad, seen)

    def _piece(self, piece: Side, keys: Pair, digit: Digit, rest: tuple[Digit, ...]) -> tuple[Node, ...]:
        """Return the gradients of one piece of queries, and of all keys and values of its block."""
        turned = [self.turned(one, digit) for one in keys]
        grad, *own = self.grads(piece, (turned[0][0], turned[1][0]), rest)
        repeated = {name: self.repeated(one, digit) for name, one in piece.items()}
        other, *others = self.kernel(repeated, (turned[0][1], turned[1][1]), is_causal=False)
        grad = self.sum(grad, self._total(self.without_later(other, digit, 0.0)))
        kept = (self._as_batch(self.without_later(one, digit, 0.0)) for one in others)
        return grad, *(self.turned_back(one, rest_of, digit) for one, rest_of in zip(own, kept, strict=True))

    def _pair(self, chunks: Side, keys: Pair, digit: Digit, rest: tuple[Digit, ...]) -> tuple[Node, ...]:
        """Return the gradients of the two chunks of a pair of blocks, and of all keys and values of the pair."""
        queries, first = self.split(chunks), (self.halves(keys[0])[0], self.halves(keys[1])[0])
        turned = [self.turned_pair(one, digit) for one in keys]
        of_queries, *own = self.grads_of_each(queries, tuple(one.own for one in turned), rest)
        half = self.kernel(queries[1], first, is_causal=False)
        picked = [self.picked(one.others, digit) for one in turned]
        taking = {name: self.picked_queries((queries[0][name], queries[1][name]), digit) for name in chunks}
        other, *others = self.kernel(taking, (picked[0], picked[1]), is_causal=False)
        one = self.sum(of_queries[0], self._total(self.without_later(other, digit, 0.0)))
        two = self.sum(of_queries[1], self._total(self.without_later(other, digit, 0.0, keep=True)))
        found = [self.joined([one, self.sum(two, half[0])])]
        for mine, rest_of, of_half in zip(own, others, half[1:], strict=True):
            ends = [self._as_batch(self.without_later(rest_of, digit, 0.0, keep=keep)) for keep in (False, True)]
            back = [self.turned_back(*some, digit, backwards=i > 0) for i, some in enumerate(zip(mine, ends, strict=True))]
            found.append(self.joined([self.sum(back[0], of_half), back[1]]))
        return tuple(found)

    def grads_of_each(self, queries: tuple[Side, Side], keys: Sequence[Pair], digits: tuple[Digit, ...]) -> list[Pair]:
        """Return the gradients of queries, keys and values, each of both chunks, where each attends to its own keys."""
        if digits:
            ends = zip(queries, *keys, (digits, self.after_half(digits)), strict=True)
            first, second = (self.grads(query, (key, value), inner) for query, key, value, inner in ends)
            return list(zip(first, second, strict=True))
        side = {name: self.as_batch((queries[0][name], queries[1][name])) for name in queries[0]}
        both = self.kernel(side, (self.as_batch(keys[0]), self.as_batch(keys[1])), is_causal=True)
        return [self.of_batch(one) for one in both]

    def split(self, side: Side) -> tuple[Side, Side]:
        """Return what the first chunk has, and what the second has."""
        first, second = ({name: self.block(one, i, 2) for name, one in side.items()} for i in range(2))
        return first, second

    def _total(self, value: Node) -> Node:
        return self.call.emit(aten.sum.dim_IntList, value, [0])

    def kernel(self, side: Side, keys: Pair, *, is_causal: bool, **changes: Any) -> tuple[Node, ...]:
        lengths: dict[str, Any] = {}
        if takes(self.call, "max_q"):
            lengths = {"max_q": tensor_of(side["query"]).shape[2], "max_k": tensor_of(keys[0]).shape[2]}
        made = remade(self.call, **side, key=keys[0], value=keys[1], is_causal=is_causal, **lengths, **changes)
        return tuple(self.wide(self.call.item(made, i)) for i in range(3))
