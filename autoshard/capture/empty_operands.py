"""Leave tensors without values out of what dynamo's graph concatenates.

A cache of keys and values starts with `torch.tensor([])` in each layer. Traced, each of these would be an input of its own,
by which equal layers, and graphs of other layers, differ.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.ir.graph import copy_graph

_CATS = (torch.cat, torch.concat, torch.concatenate)


def without_empty_operands(gm: GraphModule) -> GraphModule:
    """Return dynamo's graph without the empty operands of concatenations; the graph itself if there are none."""
    found = {node.name: kept for node in gm.graph.nodes if (kept := _kept(node)) is not None}
    if not found:
        return gm
    made = copy_graph(gm)
    for node in made.graph.nodes:
        if node.name in found:
            operands = _operands(node)
            node.args = ([tensor for tensor in operands if tensor.name in found[node.name]], *node.args[1:])
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "tensors"}
            for tensor in operands:
                if tensor.op == "call_function" and not tensor.users and not tensor.all_input_nodes:
                    made.graph.erase_node(tensor)
    return made


def _operands(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs["tensors"]


def _kept(node: Node) -> set[str] | None:
    """Return the names of a concatenation's operands that have values; None for another call, and where all have values or
    the empty ones decide the dtype.
    """
    if node.op != "call_function" or node.target not in _CATS or "out" in node.kwargs:
        return None
    operands = _operands(node)
    if not isinstance(operands, tuple | list) or not all(isinstance(one, Node) for one in operands):
        return None
    values = {one.name: one.meta.get("example_value") for one in operands}
    kept = {name: value for name, value in values.items() if not _is_empty(value)}
    if not kept or len(kept) == len(values):
        return None
    dtypes = [value.dtype for value in kept.values() if isinstance(value, torch.Tensor)]
    is_alike = dtypes and reduce(torch.promote_types, dtypes) is node.meta["example_value"].dtype
    return set(kept) if is_alike else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == (0,) and not value.requires_grad
