"""The blocks of a program, such as `layers.7`: what each computes before the tangents, and what leaves it.

A block is a module of a list; in a model without lists, a child of the model. Values of equal blocks have one name,
`layers.*.attention.wq mm`, so that what is decided for one block holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from passes.ir.graph import InputRole, input_of, operands, origin_of
from passes.ir.text import format_target


@dataclass(frozen=True)
class Blocks:
    """`block` and `kind` are of the calls in blocks that depend on no tangent, and not on parameters alone."""

    block: Mapping[Node, str]  # `layers.7`
    kind: Mapping[Node, str]  # equal in equal blocks
    early: frozenset[Node]  # all that depends on no tangent

    @staticmethod
    def of(graph: Graph) -> Blocks:
        early, static = _early(graph)
        calls = [node for node in graph.nodes if node in early and node.op == "call_function" and node not in static]
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
        return Blocks(block, kind, frozenset(early))

    def leaving(self) -> list[Node]:
        """Values that another block, or what is in none, computes with before the tangents."""
        return [
            node
            for node, own in self.block.items()
            if any(user in self.early and self.block.get(user) != own for user in node.users)
        ]


def _numbers(fqn: str) -> list[int]:
    return [place for place, part in enumerate(fqn.split(".")) if part.isdecimal()]


def _early(graph: Graph) -> tuple[set[Node], set[Node]]:
    """What depends on no tangent, and of that what parameters alone give."""
    early: set[Node] = set()
    static: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            early |= set() if input_of(node).role is InputRole.TANGENT else {node}
            static |= {node} if input_of(node).role is InputRole.PARAMETER else set()
        elif node.op == "call_function" and all(value in early for value in node.all_input_nodes):
            early.add(node)
            sources = operands(node)
            static |= {node} if sources and all(value in static for value in sources) else set()
    return early, static
