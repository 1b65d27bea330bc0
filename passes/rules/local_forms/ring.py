"""Local forms of attention whose queries, keys and values are sharded on the sequence: keys and values go around a ring.

In each of n steps, a rank's queries attend to the keys and values that it holds, while those of its neighbour are on the
way. The results of the steps are merged by their logsumexp, as soon as they are there. In the backward, parts go around
in the other direction, and the gradients of each part follow it, until they reach the rank that has it.

Causal attention: a rank has a piece in each of `outer` equal blocks of the sequence, as in `causal`. In each step a piece
attends to

1. the held pieces of all earlier blocks: one call without a mask for each block but the first,
2. the held piece of its own block: one call for all blocks, in a batch. It is causal in the first step, and without a mask
   in the others, where the result is dropped if the held piece comes later.

So every rank makes the same calls, of the same shapes, and as many of them as in `causal`.

With a mask, a rank has its rows for all keys, or the one row of all queries, and takes the columns of the keys that it holds
in a step. A row without any such key counts nothing in the merge: the kernel gives it the logsumexp 0, which is that of a row
without any key at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from passes._torch import SEND
from passes.errors import RecipeError
from passes.ir.graph import tensor_of
from passes.ir.layout import Layout, Shard
from passes.rules.local_forms.attention_pieces import (
    SEQUENCE,
    Digit,
    Pair,
    Pieces,
    inner_digits,
    is_masked,
    named,
    operand,
    runs_in_blocks,
    takes,
)
from passes.rules.local_forms.causal import CausalBackward, CausalForward
from passes.rules.local_forms.position_masks import is_by_positions, position_mask
from passes.rules.rule import LocalCall, Message

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default

_WHY = "ring: passed from rank to rank"
_KEYS, _GRADIENTS = Message("keys and values", _WHY), Message("their gradients", _WHY)


def ring_forward(call: LocalCall) -> tuple[Node, ...] | None:
    """Return `(out, logsumexp, seeds and sizes ...)` of this rank's queries; None if keys and values are whole."""
    ring = _ring(call)
    if ring is None:
        return None
    query, key, value = (named(call, name) for name in ("query", "key", "value"))
    forward = _RingForward(call, ring)
    out, logsumexp = forward.attend(query, (key, value))
    calls = forward.calls
    others = tuple(call.item(calls.plain[-1], i) for i in range(2, calls.count))
    return forward.cast(out, tensor_of(query).dtype), logsumexp, *others


def ring_backward(call: LocalCall) -> tuple[Node, ...] | None:
    """Return the gradients of this rank's queries, keys and values; None if keys and values are whole."""
    ring = _ring(call)
    if ring is None:
        return None
    grad = "grad_out" if takes(call, "grad_out") else "grad_out_"
    side = {name: named(call, name) for name in (grad, "query", "out", "logsumexp")}
    keys = named(call, "key"), named(call, "value")
    backward = _RingBackward(call, ring)
    grads = backward.grads(side, keys)
    dtype = tensor_of(side["query"]).dtype
    return tuple(backward.cast(one, dtype) for one in grads)


@dataclass(frozen=True)
class _Ring:
    """The ranks around which keys and values go, and the pieces that each has of the sequence.

    `inner` are the axes that cut a piece of queries further, while keys and values are whole on them.
    """

    ranks: int
    axes: tuple[int, ...]
    blocks: int  # equal parts of the sequence, of each of which a rank has a piece; 1 if positions do not matter
    coordinate: Node  # i64[1]
    inner: tuple[Digit, ...]
    is_causal: bool
    mask: Node | None  # of this rank's queries and all keys, in which `mask_blocks` are as `blocks`
    mask_blocks: int


def _ring(call: LocalCall) -> _Ring | None:
    queries, keys = (call.operand_layout(operand(call, name)) for name in ("query", "key"))
    axes, is_causal = keys.axes_on(SEQUENCE), runs_in_blocks(call.call)
    if not axes:
        return None
    mask = _mask(call)
    blocks, end = _blocks(call, queries, keys) if is_causal or mask is not None else (1, 1)
    inner = queries.axes_on(SEQUENCE)[len(axes) :] if is_causal else ()
    ranks, coordinate = 1, call.coordinate(axes[0])
    for number, axis in enumerate(axes):
        ranks *= call.mesh.sizes[axis]
        if number:
            before = call.emit(aten.mul.Tensor, coordinate, call.mesh.sizes[axis])
            coordinate = call.emit(aten.add.Tensor, before, call.coordinate(axis))
    digits = inner_digits(call, queries, inner, end)
    return _Ring(ranks, axes, blocks if is_causal else 1, coordinate, digits, is_causal, mask, blocks)


def _mask(call: LocalCall) -> Node | None:
    if is_by_positions(call):
        return position_mask(call)
    return named(call, "attn_mask") if is_masked(call.call) else None


def _blocks(call: LocalCall, queries: Layout, keys: Layout) -> tuple[int, int]:
    """Return how many blocks the ring cuts, and how many pieces of all blocks there are.

    Raises RecipeError if the order of the ranks in the ring is not that of their pieces in a block.
    """
    axes = keys.axes_on(SEQUENCE)
    outer, end = 0, 0
    for number, axis in enumerate(axes):
        placement = keys.on(axis)
        assert isinstance(placement, Shard)
        if number and (placement.outer != end or axis < axes[number - 1]):
            _refuse(call, queries, keys)
        outer, end = outer or placement.outer, placement.outer * call.mesh.sizes[axis]
    around = queries.axes_on(SEQUENCE)
    if around[: len(axes)] != axes or any(queries.on(axis) != keys.on(axis) for axis in axes):
        _refuse(call, queries, keys)
    return outer, end


def _refuse(call: LocalCall, queries: Layout, keys: Layout) -> None:
    raise RecipeError(
        f"causal or masked attention with queries {queries.format(call.mesh)} cannot pass keys {keys.format(call.mesh)} around "
        "a ring: the ring's axes shard the same blocks, outside of other axes and in the order of the mesh; give all axes that "
        "shard the sequence the same way, such as context(gather)"
    )


class _Round(Pieces):
    """Parts that go around the ring, and calls on the piece that a rank holds in a step."""

    def __init__(self, call: LocalCall, ring: _Ring) -> None:
        super().__init__(call)
        self.ring = ring

    def packed(self, values: tuple[Node, ...]) -> Node:
        """Return one message with all values."""
        flat = [self.call.emit(aten.view.default, self.dense(value), [-1]) for value in values]
        return self.call.emit(aten.cat.default, flat, 0)

    def unpacked(self, message: Node, like: Pair) -> Pair:
        """Undo `packed`, for two values of the shapes of `like`."""
        first, second = (tensor_of(value) for value in like)
        end = first.numel() + second.numel()
        parts = self.span(message, 0, first.numel(), dim=0), self.span(message, first.numel(), end, dim=0)
        views = [
            self.call.emit(aten.view.default, part, list(value.shape))
            for part, value in zip(parts, (first, second), strict=True)
        ]
        return views[0], views[1]

    def passed(self, message: Node, offset: int, kind: Message = _KEYS) -> Node:
        """Send a message to the rank `offset` places after this one; the result is not there yet."""
        return self.call.send(SEND, message, offset, axes=self.ring.axes, message=kind)

    def awaited(self, message: Node) -> Node:
        return self.call.emit(_WAIT, message)

    def batched(self, value: Node) -> Node:
        """Return the pieces of all blocks as a larger batch."""
        blocks = self.ring.blocks
        if blocks == 1:
            return value
        batch, heads, length, *rest = tensor_of(value).shape
        apart = self.call.emit(aten.view.default, self.dense(value), [batch, heads, blocks, length // blocks, *rest])
        order = [2, 0, 1, 3, *range(4, 4 + len(rest))]
        first = self.dense(self.call.emit(aten.permute.default, apart, order))
        return self.call.emit(aten.view.default, first, [blocks * batch, heads, length // blocks, *rest])

    def in_line(self, value: Node) -> Node:
        """Undo `batched`."""
        blocks = self.ring.blocks
        if blocks == 1:
            return value
        batch, heads, length, *rest = tensor_of(value).shape
        apart = self.call.emit(aten.view.default, self.dense(value), [blocks, batch // blocks, heads, length, *rest])
        order = [1, 2, 0, 3, *range(4, 4 + len(rest))]
        line = self.dense(self.call.emit(aten.permute.default, apart, order))
        return self.call.emit(aten.view.default, line, [batch // blocks, heads, blocks * length, *rest])

    def without_held(self, value: Node, first: int, fill: float) -> Node:
        """Replace a value by `fill` on ranks of a coordinate below `first`: those that hold a later piece."""
        late = self.call.emit(aten.lt.Scalar, self.ring.coordinate, first)
        mask = self.call.emit(aten.view.default, late, [1] * tensor_of(value).dim())
        return self.call.emit(aten.masked_fill.Scalar, value, mask, fill)

    def columns(self, held: int) -> dict[str, Node]:
        """Return the argument with the mask of the keys of the rank `held` places after this one; none without a mask."""
        if self.ring.mask is None:
            return {}
        *rows, length = tensor_of(self.ring.mask).shape
        if length == 1:
            return {"attn_mask": self.ring.mask}
        ranks, blocks = self.ring.ranks, self.ring.mask_blocks
        pieces = self.call.emit(aten.view.default, self.dense(self.ring.mask), [*rows, blocks, ranks, length // (blocks * ranks)])
        place = self._modulo(self.call.emit(aten.add.Tensor, self.ring.coordinate, held), ranks)
        chosen = self.call.emit(aten.index_select.default, pieces, len(rows) + 1, place)
        return {"attn_mask": self.call.emit(aten.view.default, chosen, [*rows, length // ranks])}

    def parted(self, value: Node) -> tuple[Node, ...]:
        """Return the piece of the first block, which has no blocks before it, and those of the others."""
        length = tensor_of(value).shape[SEQUENCE]
        piece = length // self.ring.blocks
        whole = (self.span(value, 0, piece),)
        return whole if self.ring.blocks == 1 else (*whole, self.span(value, piece, length))


class _RingForward(_Round):
    """The steps of a forward. Results are `(out, logsumexp)` in the dtype of sums."""

    def __init__(self, call: LocalCall, ring: _Ring) -> None:
        super().__init__(call, ring)
        self.calls = CausalForward(call)

    def attend(self, query: Node, keys: Pair) -> Pair:
        held, message, found = keys, self.packed(keys), dict[int, Pair]()
        pieces = self.batched(query)
        for step in range(self.ring.ranks):
            is_last = step == self.ring.ranks - 1
            following = message if is_last else self.passed(message, 1)  # sent while this step computes
            for part, result in self._results(query, pieces, held, step):
                found[part] = self._merged(found[part], result) if part in found else result
            if not is_last:
                message = self.awaited(following)
                held = self.unpacked(message, keys)
        outs, logsumexps = zip(*found.values(), strict=True)
        out, logsumexp = self.joined(list(outs)), self.joined(list(logsumexps))
        return out, self._with(logsumexp, self._unseen(logsumexp), 0.0)

    def _results(self, query: Node, pieces: Node, held: Pair, step: int) -> list[tuple[int, Pair]]:
        """Return results of one step, each for one of the parts of `parted`; `pieces` are the queries, `batched`."""
        if not self.ring.is_causal:
            return [(0, self._visible(query, held, step))]
        outs, logsumexps = self._own_block(pieces, held, step)
        pairs = zip(self.parted(outs), self.parted(logsumexps), strict=True)
        found = list(enumerate(pairs))
        return found if self.ring.blocks == 1 else [*found, (1, self._earlier(query, held))]

    def _visible(self, query: Node, held: Pair, step: int) -> Pair:
        """Attend to all held keys, or to those that the mask leaves."""
        mask = self.columns(-step)
        out, logsumexp = self.calls.kernel(query, held, is_causal=False, **mask)
        for columns in mask.values():
            if tensor_of(columns).dtype == torch.bool:
                hidden = self.call.emit(aten.logical_not.default, self.call.emit(aten.any.dim, columns, -1))
            else:
                hidden = self.call.emit(aten.eq.Scalar, self.call.emit(aten.amax.default, columns, [-1]), -torch.inf)
            logsumexp = self._with(logsumexp, hidden, -torch.inf)
        return out, logsumexp

    def _unseen(self, logsumexp: Node) -> Node | None:
        """Return a mask of the queries that have seen no key; None if there are no such."""
        return None if self.ring.mask is None else self.call.emit(aten.eq.Scalar, logsumexp, -torch.inf)

    def _with(self, value: Node, mask: Node | None, fill: float) -> Node:
        return value if mask is None else self.call.emit(aten.masked_fill.Scalar, value, mask, fill)

    def _own_block(self, pieces: Node, held: Pair, step: int) -> Pair:
        keys = self.batched(held[0]), self.batched(held[1])
        if not step:
            out, logsumexp = self.calls.attend(pieces, keys, self.ring.inner)
        else:
            out, logsumexp = self.calls.kernel(pieces, keys, is_causal=False)
            logsumexp = self.without_held(logsumexp, step, -torch.inf)
        return self.in_line(out), self.in_line(logsumexp)

    def _earlier(self, query: Node, held: Pair) -> Pair:
        """Attend to the held pieces of the blocks before each piece's own."""
        blocks, found = self.ring.blocks, []
        length = tensor_of(held[0]).shape[SEQUENCE] // blocks
        for number in range(1, blocks):
            before = self.span(held[0], 0, number * length), self.span(held[1], 0, number * length)
            found.append(self.calls.kernel(self.block(query, number, blocks), before, is_causal=False))
        outs, logsumexps = zip(*found, strict=True)
        return self.joined(list(outs)), self.joined(list(logsumexps))

    def _merged(self, one: Pair, other: Pair) -> Pair:
        """Merge results over disjoint keys; without a mask, the first has seen some key for each query."""
        emit = self.call.emit
        top = emit(aten.maximum.default, one[1], other[1])
        unseen = self._unseen(top)
        top = self._with(top, unseen, 0.0)
        weights = [emit(aten.exp.default, emit(aten.sub.Tensor, part[1], top)) for part in (one, other)]
        total = self._with(emit(aten.add.Tensor, *weights), unseen, 1.0)
        shares = [emit(aten.div.Tensor, weight, total) for weight in weights]
        if tensor_of(shares[0]).dim() < tensor_of(one[0]).dim():  # cuDNN's logsumexp has a last dim of size 1
            shares = [emit(aten.unsqueeze.default, share, -1) for share in shares]
        terms = [emit(aten.mul.Tensor, part[0], share) for part, share in zip((one, other), shares, strict=True)]
        logsumexp = emit(aten.add.Tensor, top, emit(aten.log.default, total))
        return emit(aten.add.Tensor, *terms), self._with(logsumexp, unseen, -torch.inf)


class _RingBackward(_Round):
    """The steps of a backward. `side` holds what has the queries' positions, by name; sums are in a wide dtype."""

    def __init__(self, call: LocalCall, ring: _Ring) -> None:
        super().__init__(call, ring)
        self.calls = CausalBackward(call)

    def grads(self, side: dict[str, Node], keys: Pair) -> tuple[Node, ...]:
        """Return the gradients of queries, keys and values."""
        ranks, held, message = self.ring.ranks, keys, self.packed(keys)
        pieces = {name: self.batched(one) for name, one in side.items()}
        of_queries, own, passing = dict[int, Node](), None, None
        for step in range(ranks):
            is_last = step == ranks - 1
            following = message if is_last else self.passed(message, -1)
            of_held = self._step(side, pieces, held, step, of_queries)
            if own is None:
                own = of_held
            else:
                terms = self.packed(of_held)
                terms = terms if passing is None else self.sum(self.awaited(passing), terms)
                passing = self.passed(terms, -1, _GRADIENTS)
            if not is_last:
                message = self.awaited(following)
                held = self.unpacked(message, keys)
        assert own is not None and passing is not None
        home = self.unpacked(self.awaited(passing), own)
        of_keys = tuple(self.sum(*pair) for pair in zip(own, home, strict=True))
        return self.joined([of_queries[number] for number in range(self.ring.blocks)]), *of_keys

    def _step(
        self, side: dict[str, Node], pieces: dict[str, Node], held: Pair, step: int, of_queries: dict[int, Node]
    ) -> Pair:
        """Return the gradients of the held keys and values; add those of the queries, by block.

        `pieces` is `side`, `batched`.
        """
        if not self.ring.is_causal:
            grad, key, value = self.calls.kernel(side, held, is_causal=False, **self.columns(step))
            self._add(of_queries, 0, grad)
            return key, value
        grad, *of_held = self._own_block(pieces, held, step)
        blocks = self.ring.blocks
        for number in range(blocks):
            self._add(of_queries, number, self.block(grad, number, blocks))
        if blocks > 1:
            of_held = self._with_later(side, held, of_held, of_queries)
        return of_held[0], of_held[1]

    def _add(self, sums: dict[int, Node], block: int, term: Node) -> None:
        sums[block] = self.sum(sums[block], term) if block in sums else term

    def _own_block(self, pieces: dict[str, Node], held: Pair, step: int) -> list[Node]:
        keys = self.batched(held[0]), self.batched(held[1])
        if not step:
            found = self.calls.grads(pieces, keys, self.ring.inner)
        else:
            all_of = self.calls.kernel(pieces, keys, is_causal=False)
            found = tuple(self.without_held(one, self.ring.ranks - step, 0.0) for one in all_of)
        return [self.in_line(one) for one in found]

    def _with_later(
        self, side: dict[str, Node], held: Pair, own: list[Node], of_queries: dict[int, Node]
    ) -> list[Node]:
        """Return the gradients of the held pieces with the terms of queries in blocks after their own, given those in their
        own; add to the gradients of the queries."""
        blocks, found = self.ring.blocks, list[tuple[Node, ...]]()
        for number in range(blocks - 1):
            length = {name: tensor_of(one).shape[SEQUENCE] for name, one in side.items()}
            later = {name: self.span(one, (number + 1) * length[name] // blocks, length[name]) for name, one in side.items()}
            grad, *of_held = self.calls.kernel(
                later, (self.block(held[0], number, blocks), self.block(held[1], number, blocks)), is_causal=False
            )
            found.append(tuple(of_held))
            for i in range(number + 1, blocks):
                self._add(of_queries, i, self.block(grad, i - number - 1, blocks - number - 1))
        joined = [self.joined(list(terms)) for terms in zip(*found, strict=True)]
        return [self._with_last(one, terms) for one, terms in zip(own, joined, strict=True)]

    def _with_last(self, own: Node, terms: Node) -> Node:
        """Add terms of all blocks but the last."""
        length, end = (tensor_of(value).shape[SEQUENCE] for value in (terms, own))
        return self.joined([self.sum(self.span(own, 0, length), terms), self.span(own, length, end)])
