"""Attention to padded keys: the index space in which keys may be padded, and the mask that hides their padding.

A kernel needs all keys, so that padding would be cut off before it. It may stay where no query of the model sees it: after the
positions of causal attention with as many queries, and elsewhere behind a mask. A call without one is given a mask with one row
for all queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.ir.call import Call, Tensor
from passes.ir.graph import operands, tensor_of
from passes.ir.padding import Padding, in_factor
from passes.normal_forms import At
from passes.paddings.padded_factors import Paddings
from passes.paddings.padded_values import PaddedValues
from passes.rules.attention import COLUMNS, KEYS, QUERIES, is_attention, is_attention_backward, operand_names
from passes.rules.local_forms.attention_pieces import SEQUENCE, runs_in_blocks
from passes.rules.rule import Space, rule_of

aten = torch.ops.aten
_LENGTHS = {"max_q": "query", "max_k": "key"}  # arguments that are numbers of positions


@dataclass(frozen=True)
class Opened:
    """A call of attention with a space in which keys may be padded, and the factors that are padded with them."""

    call: Call
    space: Space
    factors: Paddings


def opened(at: At, call: Call, space: Space, values: PaddedValues) -> Opened | None:
    """Return an attention whose keys may be padded, after adding a mask if it needs one; None for any other call, and where
    the padding of keys has to be cut off.
    """
    node = at.node
    if not is_attention(node.target) and not is_attention_backward(node.target):
        return None
    queries, keys = (_padding(node, call, name, values) for name in ("query", "key"))
    if runs_in_blocks(call):
        is_square = queries is not None and keys is not None and queries.padded == keys.padded
        return Opened(call, _open(space, hides=True), {}) if is_square else None
    if keys is None:
        return Opened(call, _open(space, hides=False), {})
    if not _takes_mask(node.target) or _mask_of(call) == 1:
        return None
    if _mask_of(call) is None:
        call = _with_mask(at, call)
        rule = rule_of(node.target)
        found = None if rule is None else rule.space(call)
        assert found is not None, "the same call without a mask has a space"
        space = found
    where = in_factor(space.sizes, ((KEYS,),), 0, keys.digit)
    assert where is not None
    return Opened(call, _open(space, hides=True), {COLUMNS: (where[1], keys.padded)} if COLUMNS in space.sizes else {})


def set_lengths(node: Node) -> None:
    """Set the arguments of a backward that are numbers of positions to those of its operands."""
    if not is_attention_backward(node.target) or not isinstance(node.target, OpOverload):
        return
    names = [parameter.name for parameter in node.target._schema.arguments]
    for length, of in _LENGTHS.items():
        if length in names and isinstance(node.args[names.index(length)], int):
            value = node.args[names.index(of)]
            assert isinstance(value, Node)
            node.update_arg(names.index(length), tensor_of(value).shape[SEQUENCE])


def _padding(node: Node, call: Call, name: str, values: PaddedValues) -> Padding | None:
    """Return the padding of all positions of an operand, None if there is none."""
    number = operand_names(call).index(name)
    found = values.of(operands(node)[number])
    return next((one for one in found if one.dim == SEQUENCE and one.is_whole), None)


def _open(space: Space, *, hides: bool) -> Space:
    blocked = space.blocked - {KEYS} if hides else space.blocked
    return replace(space, blocked=blocked, counted=space.counted - {QUERIES})


def _takes_mask(op: object) -> bool:
    assert isinstance(op, OpOverload)
    return any(parameter.name == "attn_mask" and parameter.kwarg_only for parameter in op._schema.arguments)


def _mask_of(call: Call) -> int | None:
    """Return the number of columns of a call's mask, None if it has none."""
    mask = call.arg("attn_mask")
    return None if mask is None else int(mask.shape[-1])


def _with_mask(at: At, call: Call) -> Call:
    """Return the call with a mask that hides nothing: what it is padded with does."""
    query = tensor_of(operands(at.node)[operand_names(call).index("query")])
    length = call.arg("key").shape[SEQUENCE]
    mask = at.call(aten.full.default, [1, length], 0.0, dtype=query.dtype, device=query.device, pin_memory=False)
    at.node.update_kwarg("attn_mask", mask)
    return replace(call, kwargs={**call.kwargs, "attn_mask": Tensor((1, length), query.dtype)})
