"""Copies of tensors that Inductor would write into while it still reads them.

Inductor lets `index_put` write into its operand where nothing reads that later. It does not look at the other operands of
the call itself: in `x.index_copy(0, index, x)` the rows that are read would be those just written. And torch 2.13 lets it write
into an operand whose elements share memory: each element of `zeros(1).expand(8).index_put(index, values)` would be one
(https://github.com/pytorch/pytorch/issues/188084).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten

_WRITING = (aten.index_put.default, aten._unsafe_index_put.default)


class CopiesBeforeOverwrites(CustomGraphPass):
    """Let `index_put` write into a copy where it reads the same memory as well, or where elements share memory.

    It is run after Inductor removes copies.
    """

    def __call__(self, graph: Graph) -> None:
        for op in _WRITING:
            for node in graph.find_nodes(op="call_function", target=op):
                written, *others = node.args
                read: list[Node] = []
                map_arg(others, read.append)
                if _is_shared(written) or any(_memory(other) == _memory(written) for other in read):
                    with graph.inserting_before(node):
                        copy = graph.call_function(aten.clone.default, (written,))
                    copy.meta["val"] = written.meta["val"].clone()
                    node.args = (copy, *others)

    def uuid(self) -> str:
        """Return a part of the key of Inductor's cache, which nothing else tells of what this package changes in Inductor."""
        return "autoshard: copies before overwrites, what else is changed in Inductor, 6"


def _is_shared(node: Any) -> bool:
    """Say whether elements of a tensor share memory, as those of `expand`; this is torch's test for it."""
    return torch._debug_has_internal_overlap(node.meta["val"]) == 1


def _memory(node: Any) -> Any:
    """Return what is equal for two nodes if they may share memory."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.args[0]
    return node
