"""torch.fx: graph modules without generated code, and the graph of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.fx.node import map_arg

from passes._torch.modes import without_autocast
from passes._torch.patches import replaced


def lazy_code() -> AbstractContextManager[None]:
    """Let graph modules that torch makes in this block generate their Python code at their first call."""
    return _use_lazy_graph_module(True)


@contextmanager
def no_code() -> Iterator[None]:
    """Let graph modules that torch makes in this block have no Python code; `module_of` turns them into callable ones."""
    with lazy_code(), replaced(GraphModule, "recompile", _not_compiled):
        yield


def _not_compiled(gm: GraphModule) -> None:
    """Do nothing, in place of `GraphModule.recompile`."""


def module_of(graph: Graph, root: torch.nn.Module) -> GraphModule:
    """Return a graph module that generates its Python code at its first call, as that takes as long as a pass."""
    return _LazyGraphModule(root, graph)


def box(gm: GraphModule) -> GraphModule:
    """Let `gm` take its inputs as one list, which it empties, so that an input can be freed before the graph ends."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm


def trace_call(
    target: Any, args: Any, kwargs: Any, values: dict[Node, torch.Tensor], decomposition_table: dict[Any, Any]
) -> GraphModule:
    """Return the graph that one call decomposes to; `values` are the fake tensors of its operands, by node."""
    nodes = list(values)

    def call(*tensors: torch.Tensor) -> Any:
        held = dict(zip(nodes, tensors, strict=True))
        positional, named = map_arg((args, kwargs), held.__getitem__)
        return target(*positional, **named)

    with without_autocast():
        made: GraphModule = make_fx(call, decomposition_table=decomposition_table)(*values.values())
    return made
