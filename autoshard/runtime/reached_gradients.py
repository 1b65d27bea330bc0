"""Find which outputs each gradient is computed from: without a tangent of any of these, autograd gives none."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from passes.ir.graph import InputRole, OutputRole, input_of, outputs_of, placeholders, returned


def outputs_of_gradients(gm: GraphModule) -> dict[str, frozenset[str]]:
    """Return the outputs whose tangents each gradient is computed from, both by name.

    A gradient that is zero whatever the tangents are is one of all outputs.
    """
    everything = {node: frozenset((input_of(node).name,)) for node in placeholders(gm.graph, InputRole.TANGENT)}
    reached: dict[Node, frozenset[str]] = {}
    for node in gm.graph.nodes:
        found = everything.get(node, frozenset[str]())
        for operand in node.all_input_nodes:
            if not reached[operand] <= found:
                found = found | reached[operand]
        reached[node] = found
    every = frozenset[str]().union(*everything.values())
    pairs = zip(outputs_of(gm.graph), returned(gm.graph), strict=True)
    gradients = ((output.name, value) for output, value in pairs if output.role is OutputRole.GRADIENT)
    return {name: (reached[value] if isinstance(value, Node) else None) or every for name, value in gradients}
