"""Local forms of causal attention beside a mask, with keys of another length, or without a logsumexp to merge parts by.

A rank's queries see keys up to their own positions, counted from the first key: that is a mask, beside the one that the call
has. It has this rank's rows for all keys, so that whole keys and a ring take it like any other mask.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.ir.layout import replicated
from passes.rules.local_forms.attention_pieces import SEQUENCE, is_masked, named, operand, runs_in_blocks
from passes.rules.rule import LocalCall, remade

aten = torch.ops.aten


def masked_by_positions(call: LocalCall) -> tuple[Node, ...] | None:
    """Return the results of a causal call with a mask in its place; None if a rank's queries are not a part of all."""
    if not is_by_positions(call) or not call.operand_layout(operand(call, "query")).axes_on(SEQUENCE):
        return None
    made = remade(call, is_causal=False, attn_mask=position_mask(call))
    return tuple(call.item(made, number) for number in range(len(call.call.results)))


def is_by_positions(call: LocalCall) -> bool:
    """Return whether the call is causal, and not to be made in blocks."""
    return bool(call.call.arg("is_causal")) and not runs_in_blocks(call.call)


def position_mask(call: LocalCall) -> Node:
    """Return the mask of this rank's queries and all keys: the call's own, without keys of later positions."""
    queries, keys = (call.call.arg(name).shape[SEQUENCE] for name in ("query", "key"))
    row = call.positions(call.operand_layout(operand(call, "query")), SEQUENCE, queries)
    column = call.positions(replicated(call.mesh), 0, keys)
    seen = call.emit(aten.ge.Tensor, call.emit(aten.unsqueeze.default, row, 1), column)
    if not is_masked(call.call):
        query = tensor_of(named(call, "query"))
        mask = call.emit(aten.full.default, [1, 1], 0.0, dtype=query.dtype, device=query.device)
    elif tensor_of(mask := named(call, "attn_mask")).dtype == torch.bool:
        return call.emit(aten.logical_and.default, mask, seen)
    return call.emit(aten.where.ScalarOther, seen, mask, -torch.inf)  # kernels take masks of the queries' dtype
