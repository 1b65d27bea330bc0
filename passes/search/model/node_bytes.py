"""Size the nodes of a graph: bytes of each with a strategy, on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from passes.cost.fused_regions import bytes_read, is_alias, node_nbytes, source_of, tensor_nbytes
from passes.cost.optimizer_step import copies_of
from passes.ir.graph import InputRole, input_of, is_reshard, operands, results_of, trained_parameters
from passes.search.model.local_sizes import LocalSizes
from passes.search.model.step_structure import StepStructure
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
    early: frozenset[str]  # parameters whose gradients are made before anything that is saved is freed
    shares: Mapping[Node, Share]

    @staticmethod
    def of(structure: StepStructure, sizes: LocalSizes, optimizer: str | None) -> NodeBytes:
        """Find the fused calls and the trained parameters of a graph."""
        shares = {node: share for region in structure.fused for node, share in _shares(region, structure).items()}
        return NodeBytes(sizes, optimizer, frozenset(trained_parameters(structure.gm.graph)), structure.early, shares)

    def stored(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a parameter; 0 for any other node."""
        if node.op != "placeholder" or input_of(node).role is not InputRole.PARAMETER:
            return 0.0
        tensor: torch.Tensor = node.meta["val"]
        return self.sizes.nbytes(tuple(tensor.shape), tensor.element_size(), strategy.results[0])

    def state(self, node: Node, strategy: Strategy) -> tuple[float, float]:
        """Return, per moment, the bytes of an input, of a buffer, or of a parameter with the optimizer's state and, from when it
        is made, its gradient.
        """
        if node.op == "placeholder" and input_of(node).role in (InputRole.INPUT, InputRole.BUFFER):
            held = self.results(node, strategy)
            return held, held
        stored = self.stored(node, strategy)
        if not self.is_trained(node):
            return stored, stored
        whole = copies_of(self.optimizer) * stored
        return whole if input_of(node).name in self.early else whole - stored, whole

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


def _shares(region: tuple[Node, ...], structure: StepStructure) -> dict[Node, Share]:
    """Return the shares of a region's calls.

    The backward reads what is saved, not what it makes again from that. What each reader computes again is neither read nor
    written.
    """
    inside, seen = set(region), set(structure.inlined)
    is_backward = _is_backward(region[0], structure)
    is_kernel = not all(node in structure.inlined for node in region)
    found = {}
    for number, node in enumerate(region):
        reads = []
        for operand in operands(node):
            source, nbytes = source_of(operand), 0
            if is_backward and source in structure.remade and source not in inside:
                saved = sum(map(node_nbytes, _saved_for(source, structure.remade, inside, seen)))
                nbytes = min(saved, node_nbytes(source))  # it is saved itself, if it is smaller
            elif source not in inside and source not in seen:
                nbytes = bytes_read(node, operand)
            reads.append(nbytes)
            seen.add(source)
        is_written = node not in structure.inlined and _is_written(node, inside, structure)
        writes = tuple(tensor_nbytes(t) if is_written else 0 for t in results_of(node))
        found[node] = Share(tuple(reads), writes, is_kernel and number == 0)
    return found


def _is_written(node: Node, inside: Collection[Node], structure: StepStructure) -> bool:
    """Return whether a call outside of a region reads a result from memory, perhaps through views."""
    return any(
        _is_written(user, inside, structure)
        if is_alias(user)
        else user not in inside and not (source_of(node) in structure.remade and _is_backward(user, structure))
        for user in node.users
    )


def _is_backward(node: Node, structure: StepStructure) -> bool:
    return node.op == "call_function" and node not in structure.forward


def _saved_for(node: Node, remade: Collection[Node], inside: Collection[Node], seen: set[Node]) -> Iterator[Node]:
    """Yield the values that a call is made again from, but those that were `seen`, which they become."""
    if node in inside or node in seen:
        return
    seen.add(node)
    if node not in remade:
        yield node
        return
    for operand in operands(node):
        yield from _saved_for(source_of(operand), remade, inside, seen)
