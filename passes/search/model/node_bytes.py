"""Size the nodes of a graph: bytes of each with a strategy, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from passes.cost.fused_regions import bytes_read, is_alias, is_fusible, regions, source_of
from passes.cost.optimizer_step import copies_of
from passes.ir.graph import InputRole, input_of, is_reshard, operands, results_of, trained_parameters
from passes.search.model.local_sizes import LocalSizes
from passes.search.model.strategies import Strategy


@dataclass(frozen=True)
class Share:
    """A fused call's part of its kernel: the bytes of the whole tensors that it reads first, and that are read
    outside."""

    reads: tuple[int, ...]  # per operand
    writes: tuple[int, ...]  # per result
    launches: bool


@dataclass(frozen=True)
class NodeBytes:
    """The bytes of the nodes of one graph; the calls of a fused region share the bytes at its border.

    A parameter keeps its gradient and the state of `optimizer` if it is trained.
    """

    sizes: LocalSizes
    optimizer: str | None
    trained: frozenset[str]
    shares: Mapping[Node, Share]

    @staticmethod
    def of(graph: Graph, sizes: LocalSizes, optimizer: str | None) -> NodeBytes:
        """Find the fused calls and the trained parameters of a graph."""
        fused = [region for region in regions(graph) if is_fusible(region[0].target)]
        shares = {node: share for region in fused for node, share in _shares(region).items()}
        return NodeBytes(sizes, optimizer, frozenset(trained_parameters(graph)), shares)

    def stored(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a parameter; 0 for any other node."""
        if node.op != "placeholder" or input_of(node).role is not InputRole.PARAMETER:
            return 0.0
        tensor: torch.Tensor = node.meta["val"]
        return self.sizes.nbytes(tuple(tensor.shape), tensor.element_size(), strategy.results[0])

    def state(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a parameter with its gradient and the optimizer's state."""
        return (copies_of(self.optimizer) if self.is_trained(node) else 1) * self.stored(node, strategy)

    def is_trained(self, node: Node) -> bool:
        """Return whether a node is a parameter that the optimizer updates."""
        return node.op == "placeholder" and input_of(node).name in self.trained

    def results(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a call's results; 0 for partial ones, as their sum is saved instead."""
        pairs = zip(results_of(node), strategy.results, strict=False)  # an input's strategy says more
        whole = ((t, layout) for t, layout in pairs if not layout.has_partial)
        return sum(self.sizes.nbytes(tuple(t.shape), t.element_size(), layout) for t, layout in whole)

    def moved(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes that a fused call reads and writes."""
        share, moved = self.shares[node], 0.0
        for operand, need, nbytes in zip(operands(node), strategy.needs, share.reads, strict=True):
            moved += nbytes * self.sizes.part(tuple(operand.meta["val"].shape), need) if nbytes else 0.0
        for result, layout, nbytes in zip(results_of(node), strategy.results, share.writes, strict=True):
            moved += nbytes * self.sizes.part(tuple(result.shape), layout) if nbytes else 0.0
        return moved

    def working(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a call's operands and results; of a fused call, only of those in memory.

        A call without operands is computed by its readers.
        """
        if node.op == "placeholder" or is_reshard(node) or is_alias(node) or _is_filled(node):
            return 0.0
        if node in self.shares:
            return self.moved(node, strategy)
        read = zip(operands(node), strategy.needs, strict=True)
        tensors = [(operand.meta["val"], need) for operand, need in read if not _is_filled(source_of(operand))]
        tensors += zip(results_of(node), strategy.results, strict=True)
        return sum(self.sizes.nbytes(tuple(t.shape), t.element_size(), layout) for t, layout in tensors)


def _is_filled(node: Node) -> bool:
    """Return whether a call, such as `full`, reads no tensors."""
    return node.op == "call_function" and not operands(node)


def _shares(region: tuple[Node, ...]) -> dict[Node, Share]:
    inside, seen = set(region), set[Node]()
    found = {}
    for number, node in enumerate(region):
        reads = []
        for operand in operands(node):
            source = source_of(operand)
            reads.append(0 if source in inside or source in seen else bytes_read(node, operand))
            seen.add(source)
        writes = tuple(t.numel() * t.element_size() if _is_read_outside(node, inside) else 0 for t in results_of(node))
        found[node] = Share(tuple(reads), writes, number == 0)
    return found


def _is_read_outside(node: Node, inside: set[Node]) -> bool:
    return any(_is_read_outside(user, inside) if is_alias(user) else user not in inside for user in node.users)
