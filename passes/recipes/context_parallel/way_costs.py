"""Predict the seconds of a layer's attention on a sharded sequence, for each way to run it.

The calls of each way are those that its local form makes, on per-device shapes, its messages those that it sends, and its
copies those that put chunks, or heads, in order. What hides: a send of a ring behind the calls of its step. Gathers and
exchanges stand before attention, which needs them, and after it, so that nothing in the layer hides them. A search prices
these as reshards, and the calls by `sharded_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from passes.cost.collective_time import collective_seconds, link_of
from passes.cost.contention import Contention
from passes.cost.kernel_time import kernel_seconds, region_seconds, tensor_bytes
from passes.hardware.hardware import Group, Hardware
from passes.ir.call import Call, Tensor
from passes.ir.collectives import Where
from passes.ir.layout import Layout, Shard
from passes.ir.mesh import Mesh
from passes.rules.attention import is_attention_backward
from passes.rules.local_forms.attention_pieces import runs_in_blocks

POSITIONS = 2  # the dim of positions in an attention's operands and results
_QUERIES = ("query", "out", "grad_out", "grad_out_")
_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")


@dataclass(frozen=True)
class Attending:
    """An attention as one axis finds it: its calls with the shapes that other axes leave, forward and perhaps backward, on
    `ranks` ranks. A rank has one piece of the sequence, or, if `is_paired`, a chunk of each half. If `parts` of another axis
    divide the queries of a piece, each has all of its keys.
    """

    calls: tuple[Call, ...]
    ranks: int
    is_paired: bool
    group: Group
    hardware: Hardware
    parts: int = 1

    @property
    def is_causal(self) -> bool:
        return runs_in_blocks(self.calls[0])

    def tensor(self, name: str) -> Tensor:
        """Return a whole operand of the forward: all positions."""
        found = self.calls[0].arg(name)
        assert isinstance(found, Tensor)
        return found

    def sent(self, kind: str, nbytes: float) -> float:
        return collective_seconds(kind, nbytes, self.group, self.hardware)

    @property
    def queries(self) -> float:
        """Return the bytes of a rank's queries, which are those of its results."""
        return tensor_bytes(self.tensor("query")) / (self.ranks * self.parts)

    def sides(self, call: Call) -> int:
        """Return how many operands have the positions of queries: in the backward, results and their gradient too."""
        return 3 if is_attention_backward(call.op) else 1

    def copied(self, nbytes: float) -> float:
        """Return the seconds of copies that read and write so many bytes."""
        return region_seconds(0.0, nbytes, self.hardware)

    def kernel(self, call: Call, queries: int, keys: int, **changes: Any) -> float:
        """Return the seconds of a call with other numbers of positions."""
        return kernel_seconds(resized(call, queries=queries, keys=keys, **changes), self.hardware)


def gather_seconds(one: Attending) -> float:
    """Return the seconds where keys and values are gathered, again in the backward, and their gradients scattered."""
    keys = [tensor_bytes(one.tensor(name)) for name in _KEYS]
    moved = sum(one.sent("all_gather", nbytes) for nbytes in keys)
    scattered = sum(one.sent("reduce_scatter", nbytes) for nbytes in keys)
    total = 0.0
    for call in one.calls:
        total += _gathered_calls(one, call) + moved + (scattered if is_attention_backward(call.op) else 0.0)
        if one.is_causal and one.is_paired:
            # Keys are put in order, queries repeated for each chunk of them; two chunks are merged of n + 1 and n results.
            queries = one.sides(call) * (1 + one.ranks) * one.queries + (one.ranks + 1.5) * one.queries
            total += one.copied(2 * sum(keys) * (2 if is_attention_backward(call.op) else 1) + queries)
    return total


def _gathered_calls(one: Attending, call: Call) -> float:
    queries, keys = (one.tensor(name).shape[2] for name in ("query", "key"))
    if not one.is_causal:
        return one.kernel(call, queries // one.ranks, keys, is_causal=False)
    chunks = 2 if one.is_paired else 1
    chunk = queries // (one.ranks * chunks)
    own = one.kernel(call, chunk, chunk, times=chunks)
    others = one.kernel(call, chunk, chunk, is_causal=False, times=one.ranks - 1)
    half = one.kernel(call, chunk, keys // 2, is_causal=False) if one.is_paired else 0.0
    return own + others + half


def ring_seconds(one: Attending) -> float:
    """Return the seconds where keys and values, and then their gradients, go around a ring."""
    total = sum(_ring_calls(one, call) for call in one.calls)
    if one.is_causal and one.is_paired:
        held, _ = _messages(one)
        for call in one.calls:  # chunks are joined in the first step, and chosen in each of the others
            chosen = one.sides(call) * one.queries + 2 * held
            total += one.copied(2 * one.sides(call) * one.queries + (one.ranks - 1) * chosen)
    return total


def _messages(one: Attending) -> tuple[float, float]:
    """Return the bytes of keys and values that a rank sends in a step, and of their gradients."""
    keys = [one.tensor(name) for name in _KEYS]
    numbers = sum(tensor_bytes(key) / key.dtype.itemsize for key in keys)
    return sum(map(tensor_bytes, keys)) / one.ranks, _width(one) * numbers / one.ranks


def _width(one: Attending) -> int:
    """Return the bytes of a number of a sum."""
    return 8 if one.tensor("query").dtype == torch.float64 else 4


def _ring_calls(one: Attending, call: Call) -> float:
    message, wide = _messages(one)
    home = one.sent("send", wide) if is_attention_backward(call.op) else 0.0  # gradients follow, and the last come home
    first, step = _step_calls(one, call, is_causal=one.is_causal), _step_calls(one, call, is_causal=False) + _merged(one, call)
    sent = one.sent("send", message)
    total = _beside(one, first, sent)
    if one.ranks > 2:  # gradients are sent from the second step on, and hide behind the third
        total += _beside(one, step, sent) + (one.ranks - 3) * _beside(one, step, sent + home) + _beside(one, step, home)
    else:
        total += step
    return total + home


def _merged(one: Attending, call: Call) -> float:
    """Return the seconds in which the results of a step are added to those of the steps before it.

    In the forward of paired chunks, two results are read and one is written, all wide. Others are merged by few kernels in all,
    which read each once, as are the gradients of queries. Gradients of keys are added as they come: wide to narrow ones.
    """
    message, wide = _messages(one)
    out = _width(one) * one.queries / one.tensor("query").dtype.itemsize
    at_once = 2 * one.ranks * one.queries / (one.ranks - 1)
    if is_attention_backward(call.op):
        return region_seconds(0.0, 2 * wide + message + at_once, one.hardware)
    return region_seconds(0.0, 3 * out if one.is_causal and one.is_paired else at_once, one.hardware)


def _beside(one: Attending, kernels: float, sent: float) -> float:
    """Return the seconds of kernels and of messages beside them, which slow each other down."""
    contention = Contention.of(one.hardware)
    end = contention.kernel_end(0.0, kernels, sent)
    return max(end, contention.link_time(sent, 0.0, end))


def sharded_seconds(call: Call, queries: Layout, keys: Layout, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of a call, forward or backward, whose queries are sharded by position: causal ones beside whole keys,
    or in a ring.

    `call` has whole positions, and the part of batch and heads that other axes leave.
    """
    one = _attending(call, queries, keys, mesh, hardware)
    return _ring_calls(one, call) if keys.axes_on(POSITIONS) else _gathered_calls(one, call)


def ring_messages(call: Call, queries: Layout, keys: Layout, mesh: Mesh, hardware: Hardware) -> tuple[Where, float]:
    """Return the link of the ring of such a call, whose keys are sharded by position, and the seconds that it is busy."""
    one = _attending(call, queries, keys, mesh, hardware)
    message, wide = _messages(one)
    sent = one.sent("send", message) + (one.sent("send", wide) if is_attention_backward(call.op) else 0.0)
    return link_of(one.group), (one.ranks - 1) * sent


def _attending(call: Call, queries: Layout, keys: Layout, mesh: Mesh, hardware: Hardware) -> Attending:
    axes, ring = queries.axes_on(POSITIONS), keys.axes_on(POSITIONS)
    outermost = queries.on(axes[0])
    assert isinstance(outermost, Shard)
    group = mesh.group_shape(tuple(mesh.names[axis] for axis in ring or axes))
    parts = math.prod(mesh.sizes[axis] for axis in axes) // group.ranks
    return Attending((call,), group.ranks, outermost.mirror > 0, group, hardware, parts)


def _step_calls(one: Attending, call: Call, *, is_causal: bool) -> float:
    """Return the seconds of the calls of one step; those of the first are causal if the attention is."""
    queries, keys = (one.tensor(name).shape[2] // one.ranks for name in ("query", "key"))
    part = queries // one.parts
    if not (one.is_causal and one.is_paired):
        if is_causal and one.parts > 1:  # to the keys of the same part, and of those before it
            own = one.kernel(call, part, part, is_causal=True)
            return own + one.kernel(call, part, part, is_causal=False, times=one.parts - 1)
        return one.kernel(call, part, keys, is_causal=is_causal)
    chunk, held = part // 2, keys // 2
    later = one.kernel(call, chunk, held, is_causal=False)  # the second chunk, to the first of those that are held
    return later + one.kernel(call, chunk, held, is_causal=is_causal, times=2 if is_causal else 1)


def exchange_seconds(one: Attending) -> float:
    """Return the seconds where positions are exchanged for heads, and back."""
    names = ("query", "key", "value", "query")  # the result is as large as the queries
    moved = sum(one.sent("all_to_all", tensor_bytes(one.tensor(name)) / one.ranks) for name in names)
    queries, keys = (one.tensor(name).shape[2] for name in ("query", "key"))
    held, _ = _messages(one)
    total = 0.0
    for call in one.calls:  # what is exchanged is put in order: queries and results, in the backward their gradients too
        is_backward = is_attention_backward(call.op)
        ordered = one.copied(2 * ((3 if is_backward else 2) * one.queries + (2 if is_backward else 1) * held))
        total += one.kernel(call, queries, keys, parts=one.ranks) + moved + ordered
    return total


def resized(
    call: Call,
    *,
    queries: int,
    keys: int,
    times: int = 1,
    batch_parts: int = 1,
    parts: int = 1,
    is_causal: bool | None = None,
) -> Call:
    """Return a call of attention with other numbers of positions, a batch that is `times` as large or a part of it, and one
    of `parts` of the heads.
    """

    def cut(tensor: Tensor, length: int) -> Tensor:
        batch, heads, _, *rest = tensor.shape
        return replace(tensor, shape=(max(1, batch * times // batch_parts), max(1, heads // parts), length, *rest))

    def cut_mask(tensor: Tensor) -> Tensor:
        *others, rows, columns = tensor.shape
        return replace(tensor, shape=(*others, min(rows, queries), min(columns, keys)))

    def changed(name: str, value: Any) -> Any:
        if name == "is_causal":
            return value if is_causal is None else is_causal
        if name in _MASKS and isinstance(value, Tensor) and value.ndim > 1:
            return cut_mask(value)
        if not isinstance(value, Tensor) or name not in (*_QUERIES, *_KEYS, "logsumexp"):
            return value
        return cut(value, keys if name in _KEYS else queries)

    names = [parameter.name for parameter in call.op._schema.arguments]
    results = list(call.results)
    lengths = (queries, keys, keys) if "grad_out" in names or "grad_out_" in names else (queries, queries)
    results[: len(lengths)] = map(cut, results, lengths)
    return replace(
        call,
        args=tuple(changed(name, value) for name, value in zip(names, call.args, strict=False)),
        kwargs={name: changed(name, value) for name, value in call.kwargs.items()},
        results=tuple(results),
    )


SECONDS: dict[str, Callable[[Attending], float]] = {
    "gather": gather_seconds,
    "ring": ring_seconds,
    "all_to_all": exchange_seconds,
}
