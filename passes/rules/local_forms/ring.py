"""Local forms of attention whose queries, keys and values are sharded on the sequence: keys and values go around a ring.

In each of n steps, a rank's queries attend to the keys and values that it holds, while those of its neighbour are on the
way. The results of the steps are merged by their logsumexp, as soon as they are there. In the backward, parts go around
in the other direction, and the gradients of each part follow it, until they reach the rank that has it.

Causal attention over `S(2~)`: a rank has two chunks of the sequence, as in `causal`, and so does the rank whose keys it holds.
In each step

1. its second chunk attends to the first of those that it holds: one call without a mask,
2. in the first step, each chunk attends to itself, in a causal call; in the others, one chunk attends to one of the same half,
   without a mask: the first where the held one comes before it, else the second. A `where` decides.

So every rank makes the same calls, of the same shapes, and as many of them as in `causal`. Over contiguous pieces, `S(2)`, a
piece attends to each held one, and what comes of later ones is dropped.

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
    joint_coordinate,
    named,
    operand,
    runs_in_blocks,
    takes,
)
from passes.rules.local_forms.causal import CausalBackward, CausalForward, Side
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
    coordinate: Node  # i64[1]
    inner: tuple[Digit, ...]
    is_causal: bool
    is_paired: bool  # a rank has two chunks, of halves in the second of which ranks count backwards
    mask: Node | None  # of this rank's queries and all keys
    blocks: int  # equal parts of the mask's columns, of each of which a rank has a piece


def _ring(call: LocalCall) -> _Ring | None:
    queries, keys = (call.operand_layout(operand(call, name)) for name in ("query", "key"))
    axes, is_causal = keys.axes_on(SEQUENCE), runs_in_blocks(call.call)
    if not axes:
        return None
    mask = _mask(call)
    is_ordered = is_causal or mask is not None
    blocks, end = _blocks(call, queries, keys) if is_ordered else (1, 1)
    inner = queries.axes_on(SEQUENCE)[len(axes) :] if is_causal else ()
    ranks, coordinate = joint_coordinate(call, axes)
    digits = inner_digits(call, queries, inner, end)
    first = keys.on(axes[0])
    assert isinstance(first, Shard)
    return _Ring(ranks, axes, coordinate, digits, is_causal, is_ordered and first.mirror > 0, mask, blocks)


def _mask(call: LocalCall) -> Node | None:
    if is_by_positions(call):
        return position_mask(call)
    return named(call, "attn_mask") if is_masked(call.call) else None


def _blocks(call: LocalCall, queries: Layout, keys: Layout) -> tuple[int, int]:
    """Return how many blocks the ring cuts, and how many pieces of all blocks there are.

    Raises RecipeError if the order of the ranks in the ring is not that of their pieces in a block.
    """
    axes = keys.axes_on(SEQUENCE)
    first = keys.on(axes[0])
    assert isinstance(first, Shard)
    end, mirror = first.outer, first.mirror
    is_first = first.is_bare or not (mirror or runs_in_blocks(call.call))
    for axis in axes:
        placement = keys.on(axis)
        assert isinstance(placement, Shard)
        if (placement.outer, placement.mirror) != (end, mirror):
            _refuse(call, queries, keys)
        end, mirror = end * call.mesh.sizes[axis], mirror * call.mesh.sizes[axis]
    is_same = queries.axes_on(SEQUENCE)[: len(axes)] == axes and all(queries.on(axis) == keys.on(axis) for axis in axes)
    if not is_first or not is_same or list(axes) != sorted(axes):
        _refuse(call, queries, keys)
    return first.outer, end


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
        return self.call.emit_copy(aten.cat.default, flat, 0)

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

    def held_later(self, first: int, ndim: int) -> Node:
        """Return a mask, true on ranks of a coordinate below `first`: those that hold a later part."""
        late = self.call.emit(aten.lt.Scalar, self.ring.coordinate, first)
        return self.call.emit(aten.view.default, late, [1] * ndim)

    def chosen(self, chunks: Pair, first: int) -> Node:
        """Return the second chunk on ranks that hold a later part, and the first on others."""
        late = self.held_later(first, tensor_of(chunks[0]).dim())
        return self.call.emit_copy(aten.where.self, late, chunks[1], chunks[0])

    def without_held(self, value: Node, first: int, fill: float, *, keep: bool = False) -> Node:
        """Replace a value by `fill` on ranks that hold a later part; with `keep`, on the others."""
        mask = self.held_later(first, tensor_of(value).dim())
        mask = self.call.emit(aten.logical_not.default, mask) if keep else mask
        return self.call.emit(aten.masked_fill.Scalar, value, mask, fill)

    def columns(self, held: int) -> dict[str, Node]:
        """Return the argument with the mask of the keys of the rank `held` places after this one; none without a mask."""
        if self.ring.mask is None:
            return {}
        *rows, length = tensor_of(self.ring.mask).shape
        if length == 1:
            return {"attn_mask": self.ring.mask}
        ranks, blocks, dim = self.ring.ranks, self.ring.blocks, len(rows)
        pieces = self.call.emit(aten.view.default, self.dense(self.ring.mask), [*rows, blocks, ranks, length // (blocks * ranks)])
        place = self._modulo(self.call.emit(aten.add.Tensor, self.ring.coordinate, held), ranks)
        if self.ring.is_paired:
            places = place, self.call.emit(aten.rsub.Scalar, place, ranks - 1)
            ends = [self.span(pieces, i, i + 1, dim=dim) for i in range(blocks)]
            found = [self.call.emit(aten.index_select.default, *pair) for pair in zip(ends, (dim + 1,) * 2, places, strict=True)]
            chosen = self.call.emit(aten.cat.default, found, dim)
        else:
            chosen = self.call.emit(aten.index_select.default, pieces, dim + 1, place)
        return {"attn_mask": self.call.emit(aten.view.default, chosen, [*rows, length // ranks])}


class _RingForward(_Round):
    """The steps of a forward. Results are `(out, logsumexp)` in the dtype of sums."""

    def __init__(self, call: LocalCall, ring: _Ring) -> None:
        super().__init__(call, ring)
        self.calls = CausalForward(call)

    def attend(self, query: Node, keys: Pair) -> Pair:
        held, message, found = keys, self.packed(keys), dict[int, Pair]()
        for step in range(self.ring.ranks):
            is_last = step == self.ring.ranks - 1
            following = message if is_last else self.passed(message, 1)  # sent while this step computes
            for part, result in self._results(query, held, step):
                found[part] = self._merged(found[part], result) if part in found else result
            if not is_last:
                message = self.awaited(following)
                held = self.unpacked(message, keys)
        outs, logsumexps = zip(*found.values(), strict=True)
        out, logsumexp = self.joined(list(outs), like=query), self.joined(list(logsumexps))
        return out, self._with(logsumexp, self._unseen(logsumexp), 0.0)

    def _results(self, query: Node, held: Pair, step: int) -> list[tuple[int, Pair]]:
        """Return results of one step, each for one of this rank's chunks, which are one without pairs."""
        if not self.ring.is_causal:
            return [(0, self._visible(query, held, step))]
        if self.ring.is_paired:
            return self._of_pair(self.halves(query), (self.halves(held[0]), self.halves(held[1])), step)
        if not step:
            return [(0, self.calls.attend(query, held, self.ring.inner))]
        out, logsumexp = self.calls.kernel(query, held, is_causal=False)
        return [(0, (out, self.without_held(logsumexp, step, -torch.inf)))]

    def _of_pair(self, queries: Pair, held: tuple[Pair, Pair], step: int) -> list[tuple[int, Pair]]:
        keys, values = held
        half = 1, self.calls.kernel(queries[1], (keys[0], values[0]), is_causal=False)
        if not step:
            return [*enumerate(self.calls.attend_each(queries, held, self.ring.inner)), half]
        chosen = [self.chosen(one, step) for one in (queries, keys, values)]
        out, logsumexp = self.calls.kernel(chosen[0], (chosen[1], chosen[2]), is_causal=False)
        masked = (self.without_held(logsumexp, step, -torch.inf, keep=keep) for keep in (False, True))
        return [*((number, (out, one)) for number, one in enumerate(masked)), half]

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

    def grads(self, side: Side, keys: Pair) -> tuple[Node, ...]:
        """Return the gradients of queries, keys and values."""
        ranks, held, message = self.ring.ranks, keys, self.packed(keys)
        of_queries, own, passing = dict[int, Node](), None, None
        for step in range(ranks):
            is_last = step == ranks - 1
            following = message if is_last else self.passed(message, -1)
            of_held = self._step(side, held, step, of_queries)
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
        return self.joined(list(of_queries.values()), like=side["query"]), *of_keys

    def _step(self, side: Side, held: Pair, step: int, of_queries: dict[int, Node]) -> Pair:
        """Return the gradients of the held keys and values; add those of the queries, by chunk."""
        if self.ring.is_causal and self.ring.is_paired:
            return self._of_pair(side, (self.halves(held[0]), self.halves(held[1])), step, of_queries)
        if self.ring.is_causal and not step:
            grad, key, value = self.calls.grads(side, held, self.ring.inner)
        else:
            grad, key, value = self.calls.kernel(side, held, is_causal=False, **self.columns(step))
        if self.ring.is_causal and step:
            grad, key, value = (self.without_held(one, self.ring.ranks - step, 0.0) for one in (grad, key, value))
        self._add(of_queries, 0, grad)
        return key, value

    def _of_pair(self, side: Side, held: tuple[Pair, Pair], step: int, of_queries: dict[int, Node]) -> Pair:
        queries, (keys, values) = self.calls.split(side), held
        grad, *of_first = self.calls.kernel(queries[1], (keys[0], values[0]), is_causal=False)
        if not step:
            found = self.calls.grads_of_each(queries, held, self.ring.inner)
        else:
            first = self.ring.ranks - step
            chosen = {name: self.chosen((queries[0][name], queries[1][name]), first) for name in side}
            pair = self.chosen(keys, first), self.chosen(values, first)
            grads = self.calls.kernel(chosen, pair, is_causal=False)
            found = [(self.without_held(one, first, 0.0), self.without_held(one, first, 0.0, keep=True)) for one in grads]
        for number, one in enumerate(found[0]):
            self._add(of_queries, number, one)
        self._add(of_queries, 1, grad)
        ends = (self.joined([self.sum(one, term), two]) for (one, two), term in zip(found[1:], of_first, strict=True))
        return next(ends), next(ends)

    def _add(self, sums: dict[int, Node], chunk: int, term: Node) -> None:
        sums[chunk] = self.sum(sums[chunk], term) if chunk in sums else term
