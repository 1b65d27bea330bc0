"""Tell outputs with a row for each sample from those that have as many rows as the batch by chance.

Nothing in a graph of fixed shapes ties noise to the batch that it is drawn for, or says that a matrix of width x width has no row
for each of as many samples. So the model's code is run once more, on tensors without data, with a batch of twice the size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from autoshard.capture.fake_module import FakeModule
from autoshard.capture.flat_call import FlatCall
from autoshard.capture.resized_call import quiet
from autoshard.capture.signature import Call, describe_output
from passes._torch import as_traced
from passes.ir.graph import InputRole, returned

_log = logging.getLogger("autoshard.capture")


def batch_outputs(flat: FlatCall, fake: FakeModule, call: Call, leaves: Mapping[str, Any], mode: Any) -> dict[str, bool | None]:
    """Return, of each output that has as many rows as the first input, whether dim 0 grows with it.

    If the model takes no batch of twice the size, return None of those that no input is read for, and nothing of others. The run
    may change `fake`.
    """
    batch = next((leaf.shape[0] for leaf in leaves.values() if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    possible = _possible(flat, batch)
    if not possible:
        return {}
    larger = {path: _doubled(leaf, batch) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves.items()}
    try:
        with quiet(), mode, as_traced():
            args, kwargs = call.with_leaves(larger)
            output = describe_output(fake.module(*args, **kwargs))
            grown = {path for path, tensor in output.tensors if tensor.shape[:1] == (2 * batch,)}
            del output
    except Exception as error:  # of the user's code, which may not take such a batch
        _log.debug("outputs are not known to grow with the batch: %s: %s", sorted(possible), error)
        return {path: None for path, reads in possible.items() if not reads}
    return {path: path in grown for path in possible}


def _possible(flat: FlatCall, batch: int) -> dict[str, bool]:
    """Return the outputs that have as many rows as the batch, and whether the values of an input lead to them."""
    graph = flat.graph_module.graph
    read: dict[Node, bool] = {}
    keys = iter(flat.tensors)
    for node in graph.nodes:
        is_input = node.op == "placeholder" and next(keys).role is InputRole.INPUT
        read[node] = is_input or (not _takes_shapes(node) and any(read[one] for one in node.all_input_nodes))
    ends = zip(flat.signature.outputs, returned(graph), strict=False)  # further results are stored in the model's objects
    return {path: read[node] for path, node in ends if isinstance(node, Node) and _rows(node) == batch}


def _takes_shapes(node: Node) -> bool:
    """Return whether a call reads no more than the shape and dtype of its operand: `randn_like`, `new_ones`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").partition(".")[0]
    return name.endswith("_like") or (name.startswith("new_") and name != "new_tensor")


def _rows(node: Node) -> int | None:
    """Return the size of dim 0; of a clone, which flattening adds, that of what is cloned."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is None and node.all_input_nodes:
        return _rows(node.all_input_nodes[0])
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None


def _doubled(leaf: torch.Tensor, batch: int) -> torch.Tensor:
    """Return a tensor with twice the rows if it has as many as the batch."""
    if leaf.dim() == 0 or leaf.shape[0] != batch:
        return leaf
    return leaf.new_empty((2 * batch, *leaf.shape[1:]), requires_grad=leaf.requires_grad)
