"""Find the values of a graph that are a parameter in another shape, order or dtype."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from passes.ir.graph import InputRole, input_of, is_reshard, operands
from passes.ir.layout import Placement, Shard
from passes.rules.rule import row_giving, space_of

aten = torch.ops.aten

_MOVES = (
    aten.permute.default,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.clone.default,
    torch.ops.prims.convert_element_type.default,
)


def weights_of(graph: Graph) -> dict[Node, Node]:
    """Return, for each moved or cast form of a parameter, the parameter's placeholder (placeholders included)."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and input_of(node).role is InputRole.PARAMETER:
            found[node] = node
        elif (node.target in _MOVES or is_reshard(node)) and operands(node)[0] in found:
            found[node] = found[operands(node)[0]]
    return found


def on_parameter(value: Node, placement: Placement, weights: dict[Node, Node], size: int) -> Placement | None:
    """Return the placement of the parameter that gives `value` this `placement`, None if there is none."""
    while value is not weights[value]:
        source = operands(value)[0]
        if not is_reshard(value):
            space = space_of(value)
            row = row_giving(space, 0, placement, size) if space is not None else None
            if row is None or not isinstance(row.operands[0], Shard):
                return None
            placement = row.operands[0]
        value = source
    return placement
