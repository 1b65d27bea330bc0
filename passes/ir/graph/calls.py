"""Functions that add calls to a graph, and copy graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, module_of
from passes.ir.graph.facts import copy_facts, has_input, input_of, set_note
from passes.ir.graph.node_values import operands, set_value, value_of
from passes.ir.graph.roles import InputRole


def reshard(value: torch.Tensor) -> torch.Tensor:
    """Change the layout, from the operand's to the node's own; on one device, return the value."""
    return value


def is_reshard(node: Node) -> bool:
    return node.op == "call_function" and node.target is reshard


def inserting_after(node: Node) -> AbstractContextManager[Any]:
    """Insert at the first place where a call can use `node`: after it, and after all placeholders."""
    while node.next.op == "placeholder":
        node = node.next
    return node.graph.inserting_after(node)


def inserting_where_placed(value: Node) -> AbstractContextManager[Any]:
    """Insert at the first place where the placement of `value` is known.

    The gradient of an output is placed as the output, so that is before the first call that reads the gradient.
    """
    if has_input(value) and input_of(value).role is InputRole.TANGENT and value.users:
        return value.graph.inserting_before(min(value.users))
    return inserting_after(value)


def add_call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """Add a call as `graph.call_function` does, with a name as capture gives them: `%mm`, not `%mm_default`."""
    name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else None
    return graph.create_node("call_function", target, args, kwargs, name)


def add_reshard(value: Node, note: str) -> Node:
    """Add a reshard of `value` after it; the caller sets its users, and its layout or pins."""
    with inserting_where_placed(value):
        new = value.graph.call_function(reshard, (value,))
    copy_facts(value, new)
    set_value(new, value_of(value))
    set_note(new, note)
    return new


def set_operands(node: Node, news: Sequence[Node]) -> None:
    """Replace the tensor operands of `node`, in order of appearance."""
    if tuple(news) == operands(node):
        return
    queue = list(news)
    node.args, node.kwargs = _swap(node.args, queue), _swap(node.kwargs, queue)


def _swap(value: Any, queue: list[Node]) -> Any:
    if isinstance(value, Node):
        return queue.pop(0)
    if isinstance(value, tuple | list):
        return type(value)(_swap(item, queue) for item in value)
    if isinstance(value, dict):
        return {key: _swap(item, queue) for key, item in value.items()}
    return value


def add_like(graph: Graph, node: Node) -> Node:
    """Add a node like one of another graph, with its name and facts; the caller sets its arguments."""
    new = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    new.meta.update(node.meta)  # as an attribute of a node takes long to set
    return new


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a separate graph with the same nodes, names and facts; fake values are shared."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copied = module_of(graph, gm)
    copied.meta = dict(gm.meta)
    return copied
