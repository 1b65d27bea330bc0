"""The partition of a joint graph into forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import networkx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse, get_aten_target, rand_ops
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from passes._torch.fake import memory_of
from passes._torch.graphs import module_of, no_code
from passes._torch.patches import replaced

# Of all minimum cuts, networkx returns the one nearest to the sink, whatever the algorithm. On these graphs, which are long and
# narrow, this one takes a tenth of the time of networkx's default.
_minimum_cut = partial(networkx.minimum_cut, flow_func=boykov_kolmogorov)
_REPEATED = (*rand_ops, torch.ops.aten.empty)  # packets of ops whose calls give another value each time


def min_cut_partition(
    joint: GraphModule, *, num_forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward of a joint graph with placeholders `primals_*` and `tangents_*`."""
    with (
        no_code(),
        replaced(partitioners, "has_recomputable_rng_ops", _draws_again),
        replaced(partitioners, "fx_graph_cse", with_equal_calls_merged),
        replaced(networkx, "minimum_cut", _minimum_cut),
    ):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=num_forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )
    return module_of(forward.graph, forward), module_of(backward.graph, backward)


def _draws_again(joint: GraphModule) -> bool:
    """Return False, so that no generator states are saved: the partitioner counts attention without dropout as
    random."""
    return False


def with_equal_calls_merged(graph: Graph, **more: Any) -> Graph:
    """Return a copy of `graph` in which equal calls are one, as torch's function does.

    From torch 2.14 on, `extra_node_key` in `more` says what else of nodes has to be equal.

    Torch's keeps calls before and after a mutation apart, for which it imports Inductor's compiler. It is called only for
    a graph that may have mutations.
    """
    if not all(_is_functional(node) for node in graph.nodes if node.op == "call_function"):
        return fx_graph_cse(graph, **more)
    extra = more.get("extra_node_key") or (lambda _: None)
    returned = {_storage(node) for node in graph.output_node().all_input_nodes} - {None}
    merged, copies, first = Graph(), dict[Node, Node](), dict[Any, Node]()
    for node in graph.nodes:
        if node.op != "call_function" or get_aten_target(node) in _REPEATED or _storage(node) in returned:
            copies[node] = merged.node_copy(node, copies.__getitem__)
            continue
        key = node.target, _key(node.args, copies), _key(node.kwargs, copies), extra(node)
        if key not in first:
            first[key] = merged.node_copy(node, copies.__getitem__)
        copies[node] = first[key]
    return merged


def _is_functional(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return not node.target._schema.is_mutable
    return node.target is operator.getitem


def _storage(node: Node) -> int | None:
    """Return the address of a value's memory, None if it has none; returned values stay separate tensors."""
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) else None


def _key(value: Any, copies: Mapping[Node, Node]) -> Any:
    if isinstance(value, Node):
        return copies[value]
    if isinstance(value, tuple | list):
        return tuple([_key(item, copies) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item, copies)) for name, item in value.items()])
    return type(value), repr(value) if isinstance(value, float) else value
