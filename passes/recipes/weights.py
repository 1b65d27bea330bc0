"""Find the values of a graph that are a parameter in another shape, order or dtype."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from passes.ir.graph import InputRole, input_of, is_reshard, operands
from passes.ir.layout import Placement, Shard
from passes.ir.padding import PAD_END
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
    PAD_END,
    aten.slice.Tensor,
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


def resized_form(value: Node, weights: dict[Node, Node]) -> Node | None:
    """Return the call that pads a parameter, or takes a part of it, of which `value` is a form; None if there is none."""
    while value is not weights[value]:
        if value.target in (PAD_END, aten.slice.Tensor):
            return value
        value = operands(value)[0]
    return None


def on_parameter(value: Node, placement: Placement, weights: dict[Node, Node], size: int) -> Placement | None:
    """Return the placement of the parameter that gives `value` this `placement`, None if there is none."""
    return on_form(value, placement, weights[value], size)


def on_form(value: Node, placement: Placement, form: Node, size: int) -> Placement | None:
    """Return the placement of `form` that gives `value`, a later form of the same parameter, this `placement`."""
    while value is not form:
        source = operands(value)[0]
        if not is_reshard(value):
            space = space_of(value)
            row = row_giving(space, 0, placement, size) if space is not None else None
            if row is None or not isinstance(row.operands[0], Shard):
                return None
            placement = row.operands[0]
        value = source
    return placement
