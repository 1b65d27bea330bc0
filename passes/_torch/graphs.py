"""torch.fx: graphs that write no code before they are called, and the graph of one call."""

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

from passes._torch.patches import replaced


def lazy_code() -> AbstractContextManager[None]:
    """Graph modules that torch makes inside write their Python code when they are called first, if ever."""
    return _use_lazy_graph_module(True)


@contextmanager
def no_code() -> Iterator[None]:
    """Graph modules that torch makes inside have no Python code; `module_of` makes of each one that can be called."""
    with lazy_code(), replaced(GraphModule, "recompile", _not_compiled):
        yield


def _not_compiled(gm: GraphModule) -> None:
    """Nothing: no code is written."""


def module_of(graph: Graph, root: torch.nn.Module) -> GraphModule:
    """Return a graph module that writes its Python code when it is called first, if ever: it takes as long as a pass."""
    return _LazyGraphModule(root, graph)


def box(gm: GraphModule) -> GraphModule:
    """Let `gm` take its inputs as one list, which it empties: an input can die before the graph ends."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm


def trace_call(
    target: Any, args: Any, kwargs: Any, values: dict[Node, torch.Tensor], decomposition_table: dict[Any, Any]
) -> GraphModule:
    """Return one call as the graph that it decomposes to; `values` are the fake tensors of its operands, by node."""
    nodes = list(values)

    def call(*tensors: torch.Tensor) -> Any:
        held = dict(zip(nodes, tensors, strict=True))
        positional, named = map_arg((args, kwargs), held.__getitem__)
        return target(*positional, **named)

    made: GraphModule = make_fx(call, decomposition_table=decomposition_table)(*values.values())
    return made
