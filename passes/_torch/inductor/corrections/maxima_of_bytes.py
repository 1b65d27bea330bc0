"""Maxima and minima of small integers: on CPUs, Inductor compares their numbers with zeros that are not theirs.

It takes 16 numbers at a time. More integers of 8 bits fit into a vector, whose rest is filled with zeros: the minimum of an
image is 0, whatever its pixels are (https://github.com/pytorch/pytorch/issues/191499). As integers of 32 bits, 16 fill a vector.
"""

from __future__ import annotations

import operator

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten = torch.ops.aten

_NARROW = (torch.int8, torch.uint8)
_COMPARING = (
    *(aten.amax.default, aten.max.default, aten.max.dim, aten.argmax.default),
    *(aten.amin.default, aten.min.default, aten.min.dim, aten.argmin.default),
)


class MaximaOfBytes(CustomGraphPass):
    """Let maxima, minima and their indices be looked for in integers of 32 bits where torch would in those of 8, on a CPU."""

    def __call__(self, graph: Graph) -> None:
        for op in _COMPARING:
            for node in graph.find_nodes(op="call_function", target=op):
                operand = node.args[0]
                narrow = operand.meta["val"].dtype
                if narrow in _NARROW and operand.meta["val"].device.type == "cpu":
                    with graph.inserting_before(node):
                        node.args = (_converted(graph, operand, torch.int32), *node.args[1:])
                    for found in _maxima(node):
                        _narrowed(graph, found, narrow)

    def uuid(self) -> str:
        """Return a part of the key of Inductor's cache."""
        return "autoshard: maxima of bytes, 1"


def _maxima(node: Node) -> list[Node]:
    """Return the nodes that give a maximum or minimum, but not those of indices."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [] if node.target in (aten.argmax.default, aten.argmin.default) else [node]
    maxima, indices = node.meta["val"]
    node.meta["val"] = (maxima.to(torch.int32), indices)
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]


def _narrowed(graph: Graph, node: Node, dtype: torch.dtype) -> None:
    """Let all that use `node`, now of 32 bits, use it as `dtype`."""
    node.meta["val"] = node.meta["val"].to(torch.int32)
    with graph.inserting_after(node):
        narrowed = _converted(graph, node, dtype)
    node.replace_all_uses_with(narrowed, delete_user_cb=lambda user: user is not narrowed)


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    converted.meta["val"] = node.meta["val"].to(dtype)
    return converted
