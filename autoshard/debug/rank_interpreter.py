"""Run a per-device program for every rank of a mesh in one process, to compute the ranks' results.

It is the reference for tests and checks. Ranks go through the program in lockstep; a collective takes the list of
local values. No process group is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload, flatten_pytree, unflatten_pytree
from passes.errors import CompilerError, UserError
from passes.ir.collectives import Simulated, kind_of_op
from passes.ir.graph import origin_of, returned
from passes.ir.mesh import Mesh

c10d = torch.ops._c10d_functional

LEAST_BYTES = 4  # of a number in float32: torch computes all ops in it, and not all in float16 and bfloat16


def run_ranks(
    gm: GraphModule,
    mesh: Mesh,
    inputs: Sequence[Sequence[Any]],
    watch: Callable[[Node, Sequence[Any]], None] | None = None,
) -> list[tuple[Any, ...]]:
    """Return the outputs of a LOCAL graph for each rank, given each rank's placeholder values, both in mesh order.

    `watch` is called after each call with its node and every rank's value.
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
    kind = kind_of_op(node.target)
    if kind is not None and isinstance(node.target, OpOverload):
        return _grouped(kind.ops[node.target], mesh, args)
    if node.target is c10d.wait_tensor.default:
        return [positional[0] for positional, _ in args]
    target: Callable[..., Any] = operator.getitem if node.target is operator.getitem else _callable(node)
    return [_called(node, target, positional, named) for positional, named in args]


def _called(node: Node, target: Callable[..., Any], positional: Any, named: Any) -> Any:
    """Return the result of an op. Raises UserError for one that torch does not compute in a dtype of low precision."""
    try:
        return target(*positional, **named)
    except RuntimeError as error:
        leaves, spec = flatten_pytree((positional, named))
        low = [leaf for _, leaf in leaves if _is_low(leaf)]
        if not low or not _runs(target, unflatten_pytree([leaf.float() if _is_low(leaf) else leaf for _, leaf in leaves], spec)):
            raise
        origin = origin_of(node)
        place = f"\n  {origin.file}:{origin.line}: {origin.source}" if origin.file else ""
        dtype, device = str(low[0].dtype).removeprefix("torch."), low[0].device.type
        raise UserError(
            f"torch does not compute {node.target} of {dtype} on {device}; give it float32, such as x.float(), or leave "
            f"mixed_precision out{place}"
        ) from error


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < LEAST_BYTES


def _runs(target: Callable[..., Any], args: tuple[Any, Any]) -> bool:
    try:
        target(*args[0], **args[1])
    except RuntimeError:
        return False
    return True


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


def _grouped(collective: Simulated, mesh: Mesh, args: list[Any]) -> list[Any]:
    """Return the results of a call on ranks that have `args`; `collective` is called once for each group of ranks."""
    results: list[Any] = [None] * len(args)
    name = str(args[0][0][-1])
    for group in mesh.groups(mesh.axes_of_group(name)):
        for place, result in zip(group, collective([args[place][0] for place in group]), strict=True):
            results[place] = result
    return results
