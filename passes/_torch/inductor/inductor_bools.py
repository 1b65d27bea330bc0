"""Collectives of booleans, for Inductor: torch's lowerings would send eight bytes for each.

Inductor promotes the operand of a lowering with its numbers, and the number of ranks is one: booleans become int64, while
the graph says that they are booleans. What reads them then computes with numbers (`~1` is -2, which is true).

What returns becomes booleans by way of float32: on a CPU, Inductor reads booleans from memory as masks of float32, and C++
has no comparison of such a mask with one of uint8, as in `max(dim)` of what returns.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from passes._torch.operators.neighbours import SEND

_CONVERT = torch.ops.prims.convert_element_type.default  # Inductor's vectors on a CPU have no views of other dtypes
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def send_booleans_as_bytes(gm: GraphModule) -> None:
    """Convert the booleans that collectives carry to uint8, and what they return to booleans, in place."""
    for node in list(gm.graph.nodes):
        if not (_is_collective(node) and _is_boolean(node.args[0])):
            continue
        part = node.args[0]
        assert isinstance(part, Node)
        with gm.graph.inserting_before(node):
            node.replace_input_with(part, _converted(part, torch.uint8))
        _retype(node)
        for wait in list(node.users):
            assert wait.target is _WAIT
            readers = list(wait.users)
            _retype(wait)
            with gm.graph.inserting_before(wait.next):
                back = _true_where_not_zero(_converted(wait, torch.float32))
            for reader in readers:
                reader.replace_input_with(wait, back)


def _is_collective(node: Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and (op.namespace == "_c10d_functional" or op is SEND) and op is not _WAIT


def _is_boolean(value: object) -> bool:
    return isinstance(value, Node) and value.meta["val"].dtype == torch.bool


def _converted(node: Node, dtype: torch.dtype) -> Node:
    converted = node.graph.call_function(_CONVERT, (node, dtype))
    converted.meta = dict(node.meta) | {"val": node.meta["val"].to(dtype)}
    return converted


def _true_where_not_zero(node: Node) -> Node:
    found = node.graph.call_function(torch.ops.aten.ne.Scalar, (node, 0))
    found.meta = dict(node.meta) | {"val": node.meta["val"].to(torch.bool)}
    return found


def _retype(node: Node) -> None:
    node.meta["val"] = node.meta["val"].to(torch.uint8)
