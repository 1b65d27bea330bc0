"""Place the residual stream, what lies between blocks: sharded on the sequence, else on more of the batch."""

from __future__ import annotations

import torch
from torch.fx import Node

from passes.ir.graph import InputRole, input_of, is_reshard, operands, tensor_of
from passes.ir.layout import Placement, Shard
from passes.rules.rule import row_giving, space_of

aten = torch.ops.aten

_SHAPES = (aten.view.default, aten.add.Tensor)  # lead from a product to the shape that model code sees


def stream_placement(node: Node, batch_parts: int, size: int) -> Placement | None:
    """Return the placement of a value between blocks: the sequence (dim 1), else more of the batch (dim 0).

    None where neither divides.
    """
    shaped = _as_model_code_sees(node)
    shape = tensor_of(shaped).shape
    tries = [Shard(1)] if len(shape) > 2 and shape[1] % size == 0 else []
    tries += [Shard(0, batch_parts)] if shape[0] % (batch_parts * size) == 0 else []
    found = (_back(shaped, node, placement, size) for placement in tries)
    return next((placement for placement in found if placement is not None), None)


def _as_model_code_sees(node: Node) -> Node:
    while tensor_of(node).dim() < 3:
        view = next((u for u in node.users if u.target in _SHAPES or is_reshard(u)), None)
        if view is None or tensor_of(view).dim() < 2:
            break
        node = view
    return node


def _back(value: Node, target: Node, placement: Shard, size: int) -> Shard | None:
    """Return the placement of `target` that gives `value` this one."""
    while value is not target:
        if is_reshard(value):
            value = operands(value)[0]
            continue
        space = space_of(value)
        row = row_giving(space, 0, placement, size) if space is not None else None
        if row is None or not isinstance(row.operands[0], Shard):
            return None
        value, placement = operands(value)[0], row.operands[0]
    return placement


def depends_on_input(node: Node) -> bool:
    """Tell whether a value is computed from an input of the model."""
    queue, seen = [node], set()
    while queue:
        value = queue.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.op == "placeholder" and input_of(value).role is InputRole.INPUT:
            return True
        queue.extend(value.all_input_nodes)
    return False
