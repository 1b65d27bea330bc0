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
        found = [self._piece(query, keys, number, digits) for number in range(digits[0].outer)]
        outs, logsumexps = zip(*found, strict=True)
        return self.joined(list(outs)), self.joined(list(logsumexps))

    def _piece(self, query: Node, keys: Pair, number: int, digits: tuple[Digit, ...]) -> Pair:
        digit, *rest = digits
        piece = self.block(query, number, digit.outer)
        turned = [self.turned(self.block(one, number, digit.outer), digit) for one in keys]
        own = self.attend(piece, (turned[0][0], turned[1][0]), tuple(rest))
        others = self.kernel(self.repeated(piece, digit), (turned[0][1], turned[1][1]), is_causal=False)
        parts = [self._one(own), (self.apart(others[0], digit), self.without_later(others[1], digit, -torch.inf))]
        if number:
            before = number * tensor_of(keys[0]).shape[SEQUENCE] // digit.outer
            earlier = self.span(keys[0], 0, before), self.span(keys[1], 0, before)
            parts.append(self._one(self.kernel(piece, earlier, is_causal=False)))
        return self._merged(parts)

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

    def grads(self, side: dict[str, Node], keys: Pair, digits: tuple[Digit, ...]) -> tuple[Node, ...]:
        """Return the gradients of queries, keys and values."""
        if not digits:
            return self.kernel(side, keys, is_causal=True)
        of_queries: list[Node] = []
        of_keys: tuple[list[Node], ...] = ([], [])  # by block
        for number in range(digits[0].outer):
            of_queries.append(self._piece(side, keys, number, digits, of_keys))
        return self.joined(of_queries), *(self.joined(blocks) for blocks in of_keys)

    def _piece(
        self, side: dict[str, Node], keys: Pair, number: int, digits: tuple[Digit, ...], of_keys: tuple[list[Node], ...]
    ) -> Node:
        """Return the gradient of one piece of queries; add its terms to the gradients of keys and values."""
        digit, *rest = digits
        piece = {name: self.block(one, number, digit.outer) for name, one in side.items()}
        turned = [self.turned(self.block(one, number, digit.outer), digit) for one in keys]
        grad, *own = self.grads(piece, (turned[0][0], turned[1][0]), tuple(rest))
        repeated = {name: self.repeated(one, digit) for name, one in piece.items()}
        other, *others = self.kernel(repeated, (turned[0][1], turned[1][1]), is_causal=False)
        grad = self.sum(grad, self.call.emit(aten.sum.dim_IntList, self.without_later(other, digit, 0.0), [0]))
        for blocks, one, rest_of in zip(of_keys, own, others, strict=True):
            kept = self._as_batch(self.without_later(rest_of, digit, 0.0))
            blocks.append(self.turned_back(one, kept, digit))
        if number:
            before = number * tensor_of(keys[0]).shape[SEQUENCE] // digit.outer
            earlier = self.span(keys[0], 0, before), self.span(keys[1], 0, before)
            seen, *terms = self.kernel(piece, earlier, is_causal=False)
            grad = self.sum(grad, seen)
            for blocks, term in zip(of_keys, terms, strict=True):
                for i in range(number):
                    blocks[i] = self.sum(blocks[i], self.block(term, i, number))
        return grad

    def kernel(self, side: dict[str, Node], keys: Pair, *, is_causal: bool, **changes: Any) -> tuple[Node, ...]:
        lengths: dict[str, Any] = {}
        if takes(self.call, "max_q"):
            lengths = {"max_q": tensor_of(side["query"]).shape[2], "max_k": tensor_of(keys[0]).shape[2]}
        made = remade(self.call, **side, key=keys[0], value=keys[1], is_causal=is_causal, **lengths, **changes)
        return tuple(self.wide(self.call.item(made, i)) for i in range(3))
