"""Run a per-device program for every rank of a mesh, in one process: what the ranks would compute.

An oracle for tests and checks. Ranks go through the program in lockstep; a collective takes the list of
local values. Nothing here knows a process group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes._torch import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from passes.errors import CompilerError
from passes.ir.graph import returned
from passes.ir.layout import reduce_terms
from passes.ir.mesh import Mesh

c10d = torch.ops._c10d_functional


def run_ranks(
    gm: GraphModule,
    mesh: Mesh,
    inputs: Sequence[Sequence[Any]],
    watch: Callable[[Node, Sequence[Any]], None] | None = None,
) -> list[tuple[Any, ...]]:
    """Outputs of a LOCAL graph for each rank, from each rank's placeholder values, both in mesh order.

    `watch` is given each call as it is made, with every rank's value.
    """
    count = len(inputs)
    values: list[dict[Node, Any]] = [{} for _ in range(count)]
    last_use = _last_uses(gm)
    position = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            for rank in range(count):
                values[rank][node] = inputs[rank][position]
            position += 1
        elif node.op == "call_function":
            results = _call(node, mesh, values)
            for rank in range(count):
                values[rank][node] = results[rank]
            if watch is not None:
                watch(node, results)
        for value in last_use.get(node, ()):
            for held in values:
                held.pop(value, None)
    return [tuple(_resolve(value, held) for value in returned(gm.graph)) for held in values]


def _last_uses(gm: GraphModule) -> dict[Node, list[Node]]:
    keep = {value for value in returned(gm.graph) if isinstance(value, Node)}
    last: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for value in node.all_input_nodes:
            last[value] = node
    found: dict[Node, list[Node]] = {}
    for value, user in last.items():
        if value not in keep and user.op != "output":
            found.setdefault(user, []).append(value)
    return found


def _call(node: Node, mesh: Mesh, values: list[dict[Node, Any]]) -> list[Any]:
    args = [_resolve((node.args, node.kwargs), held) for held in values]
    collective = _COLLECTIVES.get(node.target)
    if collective is not None:
        return _grouped(lambda calls: collective([call[0] for call in calls], *calls[0][1:-1]), mesh, args)
    if node.target in _OPERATORS:
        return _grouped(_OPERATORS[node.target], mesh, args)
    if node.target is c10d.wait_tensor.default:
        return [positional[0] for positional, _ in args]
    target: Callable[..., Any] = operator.getitem if node.target is operator.getitem else _callable(node)
    return [target(*positional, **named) for positional, named in args]


def _callable(node: Node) -> Callable[..., Any]:
    if str(node.target).startswith("_c10d_functional"):
        raise CompilerError(f"%{node.name}: {node.target} cannot be run on simulated ranks")
    assert callable(node.target)
    return node.target


def _resolve(value: Any, held: dict[Node, Any]) -> Any:
    if isinstance(value, Node):
        return held[value]
    if isinstance(value, tuple | list):
        return type(value)(_resolve(item, held) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, held) for key, item in value.items()}
    return value


def _grouped(collective: Callable[[list[Any]], list[Any]], mesh: Mesh, args: list[Any]) -> list[Any]:
    """Results of a call on ranks that have `args`; `collective` is given the positional ones of each rank of a group."""
    results: list[Any] = [None] * len(args)
    name = str(args[0][0][-1])
    for group in mesh.groups(mesh.axes_of_group(name)):
        for place, result in zip(group, collective([args[place][0] for place in group]), strict=True):
            results[place] = result
    return results


def _all_gather(tensors: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    return [torch.cat(tensors)] * size


def _all_gather_coalesced(lists: list[list[torch.Tensor]], size: int) -> list[list[torch.Tensor]]:
    return [[torch.cat(tensors) for tensors in zip(*lists, strict=True)]] * size


def _all_reduce(tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    return [reduce_terms(torch.stack(tensors), op)] * len(tensors)


def _reduce_scatter(tensors: list[torch.Tensor], op: str, size: int) -> list[torch.Tensor]:
    return list(reduce_terms(torch.stack(tensors), op).chunk(size))


def _reduce_scatter_coalesced(lists: list[list[torch.Tensor]], op: str, size: int) -> list[list[torch.Tensor]]:
    scattered = [_reduce_scatter(list(tensors), op, size) for tensors in zip(*lists, strict=True)]
    return [list(parts) for parts in zip(*scattered, strict=True)]


def _all_to_all(tensors: list[torch.Tensor], outputs: list[int], inputs: list[int]) -> list[torch.Tensor]:
    pieces = [torch.split(tensor, inputs) for tensor in tensors]
    return [torch.cat([sent[place] for sent in pieces]) for place in range(len(tensors))]


def _all_gather_matmul(calls: list[Any]) -> list[list[torch.Tensor]]:
    _, _, dim, keep, *_ = calls[0]
    whole = torch.cat([call[0] for call in calls], dim)
    return [[*(torch.matmul(whole, other) for other in call[1]), *([whole] if keep else [])] for call in calls]


def _matmul_reduce_scatter(calls: list[Any]) -> list[torch.Tensor]:
    _, _, reduction, dim, *_ = calls[0]
    total = reduce_terms(torch.stack([torch.matmul(rows, other) for rows, other, *_ in calls]), reduction)
    return [part.contiguous() for part in total.chunk(len(calls), dim)]


_COLLECTIVES: dict[Any, Callable[..., list[Any]]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_gather_into_tensor_coalesced.default: _all_gather_coalesced,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.reduce_scatter_tensor_coalesced.default: _reduce_scatter_coalesced,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_to_all_single.default: _all_to_all,
}

_OPERATORS: dict[Any, Callable[[list[Any]], list[Any]]] = {
    ALL_GATHER_MATMUL: _all_gather_matmul,
    MATMUL_REDUCE_SCATTER: _matmul_reduce_scatter,
}
