"""The values that the backward recomputes."""

from __future__ import annotations

from torch.fx import Graph, Node

from passes.ir.graph.facts import input_of, is_recompute
from passes.ir.graph.node_values import operands
from passes.ir.graph.roles import InputRole


def made_again(graph: Graph) -> set[Node]:
    """Return what the backward recomputes if it needs it.

    These are the values with `is_recompute`, and those computed from these or from parameters alone.
    """
    static, again = set[Node](), set[Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            static.update({node} if input_of(node).role is InputRole.PARAMETER else ())
            continue
        sources = operands(node)
        is_static = bool(sources) and all(source in static for source in sources)
        static.update({node} if is_static else ())
        if is_recompute(node):
            again.add(node)
        elif node.op != "output" and any(source in again for source in sources):
            follows = is_static and all(source in again or source.op == "placeholder" for source in sources)
            again.update({node} if follows or len(sources) == 1 else ())
    return again
