"""The blocks of a program, such as `layers.7`: the values that each computes in the forward, and its results.

A block is a module of a list; in a model without lists, a child of the model. An `nn.Sequential` of unlike steps, such as
convolution and activation, is no list but one block. Values of equal blocks share a name, `layers.*.attention.wq mm`, so
that a decision for one block holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from passes.ir.graph import InputRole, OutputRole, input_of, operands, origin_of, outputs_of, region_of, returned
from passes.ir.text import format_target

Path = tuple[str, ...]  # the parts of an FQN


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
        paths = {node: tuple(origin_of(node).fqn.split(".")) for node in calls}
        sequences = _sequences(paths)
        numbers = {node: [place for place in _numbers(path) if path[:place] not in sequences] for node, path in paths.items()}
        has_lists = any(numbers.values())
        block: dict[Node, str] = {}
        kind: dict[Node, str] = {}
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for node, path in paths.items():
            ends = [*numbers[node], *(place - 1 for place in _numbers(path) if path[:place] in sequences)] if has_lists else [0]
            if not ends or not path[0]:
                continue
            end = ends[0]
            number = "*" if numbers[node] else path[end]
            name = ".".join((*path[:end], number, *path[end + 1 :]))
            block[node] = ".".join(path[: end + 1])
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


def _numbers(path: Path) -> list[int]:
    return [place for place, part in enumerate(path) if part.isdecimal()]


def _sequences(paths: Mapping[Node, Path]) -> set[Path]:
    """Return the modules, other than the model, whose numbered children are unlike steps of one block, as convolution, norm and
    activation in an `nn.Sequential`: children that have none themselves and make different calls."""
    made: dict[Path, dict[str, list[object]]] = defaultdict(lambda: defaultdict(list))
    for node, path in paths.items():
        for place in _numbers(path)[:1]:
            made[path[:place]][path[place]].append(node.target if place == len(path) - 1 else None)
    return {
        path
        for path, children in made.items()
        if path
        and all(None not in calls for calls in children.values())
        and any(calls != next(iter(children.values())) for calls in children.values())
    }


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
