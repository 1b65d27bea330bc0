"""Copy part of a graph into a separate graph, on which a pass tries a change before it applies it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import module_of
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    has_input,
    outputs_of,
    returned,
    set_input,
    set_outputs,
)


def excerpt(nodes: Iterable[Node]) -> GraphModule:
    """Copy the calls `nodes`, in program order: what they read of others is an input, what others read is returned.

    Parameters, saved values and gradients are such here too. Items of a tuple that is made outside are inputs.
    """
    inside: dict[Node, None] = {}
    for node in nodes:
        if node.target is not operator.getitem or node.args[0] in inside:
            inside[node] = None
    given = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in inside)
    graph, copies = Graph(), dict[Node, Node]()
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if not has_input(node):
            set_input(copies[node], Input(InputRole.INPUT, node.name))
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    ends = [node for node in inside if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[end] for end in ends))
    roles = _roles(next(iter(inside)).graph)
    set_outputs(graph, tuple(roles.get(end, Output(OutputRole.OUTPUT, end.name)) for end in ends))
    return module_of(graph, torch.nn.Module())


def _roles(graph: Graph) -> dict[Node, Output]:
    ends = zip(returned(graph), outputs_of(graph), strict=True)
    return {value: output for value, output in ends if isinstance(value, Node)}
