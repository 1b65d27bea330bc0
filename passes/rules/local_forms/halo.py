"""Halo exchange: a rank's part of a sharded dim, with the positions of its neighbours that a kernel reaches.

A part gets the last positions of the part before it, and the first ones of the part after it. All ranks send, around a ring;
the first and the last one replace by zeros what comes from the other end. The backward sends gradients of what was received
back to the rank that has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from passes._torch import SEND
from passes.ir.graph import tensor_of
from passes.rules.rule import LocalCall, Message

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default

_WHY = "halo: positions of neighbours that a kernel reaches"
_ENDS, _GRADIENTS = Message("boundary positions", _WHY), Message("gradients of boundary positions", _WHY)


@dataclass(frozen=True)
class Halo:
    """The positions beyond both ends of a rank's part of `dim`, which `axis` shards in order; not more than a part has."""

    dim: int
    axis: int
    before: int
    after: int


def extended(call: LocalCall, part: Node, halo: Halo) -> Node:
    """Return a part between those positions of its neighbours, zeros beyond the ends of the whole."""
    length = tensor_of(part).shape[halo.dim]
    sent = _Sent(call, halo, _ENDS)
    before = sent.to_next(sent.span(part, length - halo.before, length)) if halo.before else None
    after = sent.to_last(sent.span(part, 0, halo.after)) if halo.after else None
    values = [sent.received(before, from_last=True), part, sent.received(after, from_last=False)]
    found = [value for value in values if value is not None]
    return part if len(found) == 1 else call.emit(aten.cat.default, found, halo.dim)


def folded(call: LocalCall, grad: Node, halo: Halo) -> Node:
    """Return the gradient of a part from that of `extended`: with the terms that the neighbours have."""
    total = tensor_of(grad).shape[halo.dim]
    length = total - halo.before - halo.after
    sent = _Sent(call, halo, _GRADIENTS)
    of_last = sent.to_last(sent.span(grad, 0, halo.before)) if halo.before else None
    of_next = sent.to_next(sent.span(grad, total - halo.after, total)) if halo.after else None
    own = sent.span(grad, halo.before, total - halo.after)
    own = sent.added(own, sent.received(of_last, from_last=False), length - halo.before)
    return sent.added(own, sent.received(of_next, from_last=True), 0)


class _Sent:
    """Sends between neighbours on the axis of a halo."""

    def __init__(self, call: LocalCall, halo: Halo, message: Message) -> None:
        self.call, self.halo, self.message = call, halo, message

    def span(self, value: Node, start: int, end: int) -> Node:
        if tensor_of(value).shape[self.halo.dim] == end - start:
            return value
        return self.call.emit(aten.slice.Tensor, value, self.halo.dim, start, end)

    def to_next(self, value: Node) -> Node:
        return self._send(value, 1)

    def to_last(self, value: Node) -> Node:
        return self._send(value, -1)

    def _send(self, value: Node, offset: int) -> Node:
        if not tensor_of(value).is_contiguous():
            value = self.call.emit(aten.clone.default, value, memory_format=torch.contiguous_format)
        return self.call.send(SEND, value, offset, axes=(self.halo.axis,), message=self.message)

    def received(self, value: Node | None, *, from_last: bool) -> Node | None:
        """Return what was sent, zeros on the rank that has no such neighbour; None if nothing was."""
        if value is None:
            return None
        end = 0 if from_last else self.call.mesh.sizes[self.halo.axis] - 1
        is_end = self.call.emit(aten.eq.Scalar, self.call.coordinate(self.halo.axis), end)
        mask = self.call.emit(aten.view.default, is_end, [1] * tensor_of(value).dim())
        return self.call.emit(aten.masked_fill.Scalar, self.call.emit(_WAIT, value), mask, 0)

    def added(self, value: Node, term: Node | None, start: int) -> Node:
        """Add a term to the positions from `start` on."""
        if term is None:
            return value
        end = tensor_of(value).shape[self.halo.dim] - tensor_of(term).shape[self.halo.dim] - start
        pads = [0, 0] * (tensor_of(value).dim() - 1 - self.halo.dim) + [start, end]
        return self.call.emit(aten.add.Tensor, value, self.call.emit(aten.constant_pad_nd.default, term, pads, 0))
