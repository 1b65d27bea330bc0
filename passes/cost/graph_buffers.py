"""Assign a buffer to each value of a graph; a view shares the buffer of its operand."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.cost.fused_regions import is_alias, tensor_nbytes
from passes.cost.program import Buffer
from passes.ir.graph import InputRole, input_of, operands, origin_of, results_of, value_of


@dataclass(frozen=True)
class Values:
    """The buffers of a graph by name."""

    names: Mapping[Node, tuple[str, ...]]  # one per tensor that a node gives
    readers: Mapping[str, list[Node]]  # calls that read a buffer, through views or directly
    sizes: Mapping[str, int]  # bytes
    inputs: Mapping[str, tuple[InputRole, Buffer]]  # those that are live before the graph runs


def values_of_graph(graph: Graph, held: Mapping[Node, tuple[Buffer, ...]], *, backward: bool) -> Values:
    """Return the buffers of all values of a graph; `held` gives those of placeholders that an earlier graph has
    filled."""
    names: dict[Node, tuple[str, ...]] = {}
    readers: dict[str, list[Node]] = {}
    sizes = {buffer.name: buffer.nbytes for buffers in held.values() for buffer in buffers}
    inputs: dict[str, tuple[InputRole, Buffer]] = {}
    for node in graph.nodes:
        if node in held:
            names[node] = tuple(buffer.name for buffer in held[node])
        elif node.op == "placeholder":
            buffers = _input_buffers(node, backward=backward)
            names[node] = tuple(buffer.name for buffer in buffers)
            inputs |= {buffer.name: (input_of(node).role, buffer) for buffer in buffers}
            sizes |= {buffer.name: buffer.nbytes for buffer in buffers}
        else:
            source = viewed_by(node)
            if source is None:
                for name in (name for operand in operands(node) for name in names[operand]):
                    readers.setdefault(name, []).append(node)
            if node.op != "output":
                names[node] = _names(node, source, names, backward=backward)
                if source is None:
                    sizes |= dict(zip(names[node], map(tensor_nbytes, results_of(node)), strict=True))
    return Values(names, readers, sizes, inputs)


def viewed_by(node: Node) -> Node | None:
    """Return the operand whose memory the result of `node` shares; None for a node with buffers of its own."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    is_view = is_alias(node) or node.target is torch.ops._c10d_functional.wait_tensor.default
    return source if is_view and isinstance(source, Node) else None


def _names(
    node: Node, source: Node | None, names: Mapping[Node, tuple[str, ...]], *, backward: bool
) -> tuple[str, ...]:
    if source is None:
        stem = f"backward.{node.name}" if backward else node.name
        return tuple(f"{stem}.{number}" if number else stem for number in range(len(results_of(node))))
    if node.target is not operator.getitem:
        return names[source][:1]
    position = _tensor_position(source, node.args[1])
    if position is None:
        return ()
    return (names[source][position] if len(names[source]) > 1 else names[source][0],)


def _tensor_position(source: Node, index: Any) -> int | None:
    """Return where item `index` stands among the tensor results; None for an item that is no tensor."""
    value = value_of(source)
    if not isinstance(value[index], torch.Tensor):
        return None
    return sum(isinstance(item, torch.Tensor) for item in value[:index])


def _input_buffers(node: Node, *, backward: bool) -> tuple[Buffer, ...]:
    """Return the buffer of a placeholder; none for a number."""
    if not isinstance(value_of(node), torch.Tensor):
        return ()
    given = input_of(node)
    kind = _INPUT_KINDS[given.role]
    is_saved = given.role is InputRole.SAVED
    fqn = given.name if kind in ("parameter", "buffer") else origin_of(node).fqn if is_saved else ""
    name, nbytes = f"{given.role.value}.{given.name}", tensor_nbytes(value_of(node))
    return (Buffer(name, nbytes, kind, fqn, node.name, backward and not is_saved),)


_INPUT_KINDS = {
    InputRole.PARAMETER: "parameter",
    InputRole.BUFFER: "buffer",
    InputRole.INPUT: "input",
    InputRole.TANGENT: "temporary",
    InputRole.COORDINATE: "input",
    InputRole.SEED: "input",
    InputRole.SAVED: "activation",
}
