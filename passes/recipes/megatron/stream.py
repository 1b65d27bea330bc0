"""Place the residual stream, the values between blocks: sharded on the sequence, else on more of the batch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.fx import Node

from passes.ir.graph import InputRole, input_of, is_reshard, operands, tensor_of
from passes.ir.layout import Placement, Shard
from passes.rules.rule import row_giving, space_of

aten = torch.ops.aten

_SHAPES = (aten.view.default, aten.add.Tensor)  # ops between a product and the shape in the model's code


def stream_placement(node: Node, batch_parts: int, size: int) -> Placement | None:
    """Return the placement of a value between blocks: the sequence (dim 1), else more of the batch (dim 0).

    None if neither divides.
    """
    path = _to_model_shape(node)
    shape = tensor_of(path[-1]).shape
    tries = [Shard(1)] if len(shape) > 2 and shape[1] % size == 0 else []
    tries += [Shard(0, batch_parts)] if shape[0] % (batch_parts * size) == 0 else []
    found = (_back(path, placement, size) for placement in tries)
    return next((placement for placement in found if placement is not None), None)


def _to_model_shape(node: Node) -> list[Node]:
    """Return the values from `node` to the first with the shape in the model's code: batch, sequence, features."""
    path = [node]
    while tensor_of(path[-1]).dim() < 3:
        following = next((u for u in path[-1].users if u.target in _SHAPES or is_reshard(u)), None)
        if following is None or tensor_of(following).dim() < 2:
            break
        path.append(following)
    return path


def _back(path: list[Node], placement: Shard, size: int) -> Shard | None:
    """Return the placement of the first value of `path` that gives the last one `placement`."""
    for operand, value in reversed(list(pairwise(path))):
        if is_reshard(value):
            continue
        space = space_of(value)
        row = row_giving(space, 0, placement, size) if space is not None else None
        need = None if row is None else row.operands[operands(value).index(operand)]
        if not isinstance(need, Shard):
            return None
        placement = need
    return placement


def depends_on_input(node: Node) -> bool:
    """Return whether a value is computed from an input of the model."""
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
