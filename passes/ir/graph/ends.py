"""The inputs and outputs of a graph, in order."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from passes.ir.graph.facts import facts_of, input_of, update_facts
from passes.ir.graph.roles import InputRole, Output, OutputRole


def placeholders(graph: Graph, role: InputRole | None = None) -> tuple[Node, ...]:
    """Return the placeholders in order, of one role if given."""
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    return tuple(node for node in nodes if role is None or input_of(node).role is role)


def output_node(graph: Graph) -> Node:
    return graph.output_node()


def returned(graph: Graph) -> tuple[Any, ...]:
    """Return the nodes (or None) of the output tuple."""
    values = output_node(graph).args[0]
    assert isinstance(values, tuple | list)
    return tuple(values)


def outputs_of(graph: Graph) -> tuple[Output, ...]:
    """Return what each element of the output tuple stands for."""
    found = facts_of(output_node(graph)).outputs
    assert found is not None, "outputs that are not described"
    return found


def trained_parameters(graph: Graph) -> set[str]:
    """Return the names of the parameters of which the graph returns a gradient."""
    ends = zip(returned(graph), outputs_of(graph), strict=True)
    return {output.name for value, output in ends if value is not None and output.role is OutputRole.GRADIENT}


def has_outputs(graph: Graph) -> bool:
    return facts_of(output_node(graph)).outputs is not None


def has_backward(graph: Graph) -> bool:
    """Return whether the graph computes a gradient; it does not if no parameter or input that needs one is used."""
    return any(output.role is OutputRole.GRADIENT for output in outputs_of(graph))


def set_outputs(graph: Graph, outputs: tuple[Output, ...]) -> None:
    update_facts(output_node(graph), outputs=tuple(outputs))
