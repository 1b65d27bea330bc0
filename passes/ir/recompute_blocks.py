"""The blocks of a program, such as `layers.7`: the values that each computes in the forward, and its results.

A block is a module of a list; in a model without lists, a child of the model. Values of equal blocks share a name,
`layers.*.attention.wq mm`, so that a decision for one block holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from passes.ir.graph import InputRole, OutputRole, input_of, operands, origin_of, outputs_of, region_of, returned
from passes.ir.text import format_target


@dataclass(frozen=True)
class Blocks:
    """The `block` and the `kind` of each forward call in a block, without those that depend on parameters alone."""

    block: Mapping[Node, str]  # `layers.7`
    kind: Mapping[Node, str]  # equal in equal blocks
    forward: frozenset[Node]  # all that results other than gradients are made of

    @staticmethod
    def of_regions(graph: Graph) -> Blocks:
        """Read the blocks from the user's program: each call of `torch.utils.checkpoint` is one."""
        forward, static = _forward(graph)
        regions = {node: region_of(node) for node in graph.nodes if node in forward and node not in static}
        block = {node: f"region {region}" for node, region in regions.items() if region is not None}
        return Blocks(block, block, frozenset(forward))

    @staticmethod
    def of(graph: Graph) -> Blocks:
        forward, static = _forward(graph)
        calls = [node for node in graph.nodes if node in forward and node.op == "call_function" and node not in static]
        fqns = {node: origin_of(node).fqn for node in calls}
        is_list = any(_numbers(fqn) for fqn in fqns.values())
        block: dict[Node, str] = {}
        kind: dict[Node, str] = {}
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for node in calls:
            end = next(iter(_numbers(fqns[node])), None) if is_list else 0
            parts = fqns[node].split(".")
            if end is None or not parts[0]:
                continue
            name = ".".join((*parts[:end], "*" if is_list else parts[0], *parts[end + 1 :]))
            block[node] = ".".join(parts[: end + 1])
            what = f"{name} {format_target(node.target)}"
            seen[block[node], what] += 1
            count = seen[block[node], what]
            kind[node] = what if count == 1 else f"{what} #{count}"
        return Blocks(block, kind, frozenset(forward))

    def leaving(self) -> list[Node]:
        """Return the values that the forward uses in another block, or outside of all."""
        return [
            node
            for node, own in self.block.items()
            if any(user in self.forward and self.block.get(user) != own for user in node.users)
        ]


def _numbers(fqn: str) -> list[int]:
    return [place for place, part in enumerate(fqn.split(".")) if part.isdecimal()]


def _forward(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Return the calls that results other than gradients depend on, and among them those that depend on parameters
    alone."""
    ends = zip(returned(graph), outputs_of(graph), strict=True)
    waiting = [value for value, output in ends if isinstance(value, Node) and output.role is not OutputRole.GRADIENT]
    forward: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in forward:
            forward.add(node)
            waiting += node.all_input_nodes
    static: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            static |= {node} if input_of(node).role is InputRole.PARAMETER else set()
        elif node in forward:
            sources = operands(node)
            static |= {node} if sources and all(value in static for value in sources) else set()
    return forward, static
