"""Cost the nodes of a graph: seconds and bytes of each with a strategy, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from passes._torch import OpOverload
from passes.cost.fused_regions import bytes_read, is_alias, is_fusible, regions, source_of
from passes.cost.kernel_time import kernel_seconds
from passes.cost.optimizer_step import copies_of, passes_over
from passes.ir.graph import InputRole, input_of, is_reshard, operands, results_of, trained_parameters
from passes.ir.layout import Layout
from passes.rules.rule import Call, Tensor, call_of
from passes.search.model.factor_graph import Floats
from passes.search.model.strategies import Strategy
from passes.search.model.unit_costs import UnitCosts


@dataclass(frozen=True)
class _Share:
    """A fused call's part of its kernel: the bytes of the whole tensors that it reads first, and that are read
    outside."""

    reads: tuple[int, ...]  # per operand
    writes: tuple[int, ...]  # per result
    launches: bool


class NodeCosts:
    """The costs of the nodes of one graph; the calls of a fused region share the bytes at its border.

    A parameter costs its update by `optimizer`, and keeps its gradient and the optimizer's state, if it is trained.
    """

    def __init__(self, graph: Graph, unit_costs: UnitCosts, optimizer: str | None) -> None:
        self.unit_costs = unit_costs
        self.optimizer = optimizer
        self._trained = trained_parameters(graph)
        self._shares: dict[Node, _Share] = {}
        for region in regions(graph):
            if is_fusible(region[0].target):
                self._shares |= _shares(region)
        self._calls: dict[Node, Call] = {}
        self._keys: dict[Node, object] = {}  # equal for nodes that cost the same
        self._times: dict[object, Floats] = {}
        self._sizes: dict[object, tuple[tuple[Strategy, ...], tuple[Floats, Floats, Floats]]] = {}

    def on(self, unit_costs: UnitCosts) -> NodeCosts:
        """Return the same on other hardware; bytes do not change."""
        new = copy(self)
        new.unit_costs, new._times = unit_costs, {}
        return new

    def costs(self, node: Node, strategies: tuple[Strategy, ...]) -> tuple[Floats, Floats, Floats, Floats]:
        """Return, per strategy, seconds, bytes of a parameter's state, of a call's results, and of what a call works on."""
        if node not in self._keys:
            self._keys[node] = self._key(node)
        key = self._keys[node], id(strategies)
        if key not in self._sizes:
            state, results, working = (
                np.array([one(node, strategy) for strategy in strategies]) for one in (self._state, self._results, self._working)
            )
            self._sizes[key] = strategies, (state, results, working)  # with `strategies`, whose id is theirs as long as they are
        if key not in self._times:
            self._times[key] = np.array([self._seconds(node, strategy) for strategy in strategies])
        return self._times[key], *self._sizes[key][1]

    def _key(self, node: Node) -> object:
        if node.op == "placeholder":
            return node
        return repr(call_of(node)) if isinstance(node.target, OpOverload) else node.target, self._shares.get(node)

    def _seconds(self, node: Node, strategy: Strategy) -> float:
        """Return the seconds of a call; of a parameter, those of its update by the optimizer."""
        if node.op == "placeholder":
            moved = passes_over(self.optimizer) * self._stored(node, strategy) if self._is_trained(node) else 0.0
            return moved / self.unit_costs.hardware.memory_bandwidth
        if is_reshard(node) or is_alias(node):
            return 0.0
        if node in self._shares:
            return self._fused(node, strategy)
        if node not in self._calls:
            self._calls[node] = call_of(node)
        return kernel_seconds(self._local(self._calls[node], strategy), self.unit_costs.hardware)

    def _fused(self, node: Node, strategy: Strategy) -> float:
        hardware = self.unit_costs.hardware
        return self._moved(node, strategy) / hardware.memory_bandwidth + (hardware.launch if self._shares[node].launches else 0.0)

    def _moved(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes that a fused call reads and writes."""
        share, moved = self._shares[node], 0.0
        for operand, need, nbytes in zip(operands(node), strategy.needs, share.reads, strict=True):
            moved += nbytes * self.unit_costs.sizes.part(tuple(operand.meta["val"].shape), need) if nbytes else 0.0
        for result, layout, nbytes in zip(results_of(node), strategy.results, share.writes, strict=True):
            moved += nbytes * self.unit_costs.sizes.part(tuple(result.shape), layout) if nbytes else 0.0
        return moved

    def _local(self, call: Call, strategy: Strategy) -> Call:
        layouts = list(strategy.needs)
        args, kwargs = self._swap(call.args, layouts), self._swap(call.kwargs, layouts)
        results = tuple(self._part(t, layout) for t, layout in zip(call.results, strategy.results, strict=True))
        return Call(call.op, args, kwargs, results)

    def _swap(self, value: Any, layouts: list[Layout]) -> Any:
        if isinstance(value, Tensor):
            return self._part(value, layouts.pop(0))
        if isinstance(value, tuple | list):
            return tuple(self._swap(item, layouts) for item in value)
        if isinstance(value, Mapping):
            return {key: self._swap(item, layouts) for key, item in value.items()}
        return value

    def _part(self, tensor: Tensor, layout: Layout) -> Tensor:
        return Tensor(self.unit_costs.sizes.local(tensor.shape, layout), tensor.dtype)

    def _state(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a parameter with its gradient and the optimizer's state."""
        return (copies_of(self.optimizer) if self._is_trained(node) else 1) * self._stored(node, strategy)

    def _is_trained(self, node: Node) -> bool:
        return node.op == "placeholder" and input_of(node).name in self._trained

    def _results(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a call's results; 0 for partial ones, as their sum is saved instead."""
        pairs = zip(results_of(node), strategy.results, strict=False)  # an input's strategy says more
        whole = ((t, layout) for t, layout in pairs if not layout.has_partial)
        return sum(self.unit_costs.sizes.nbytes(tuple(t.shape), t.element_size(), layout) for t, layout in whole)

    def _stored(self, node: Node, strategy: Strategy) -> float:
        if node.op != "placeholder" or input_of(node).role is not InputRole.PARAMETER:
            return 0.0
        tensor: torch.Tensor = node.meta["val"]
        return self.unit_costs.sizes.nbytes(tuple(tensor.shape), tensor.element_size(), strategy.results[0])

    def _working(self, node: Node, strategy: Strategy) -> float:
        """Return the bytes of a call's operands and results; of a fused call, only of those in memory.

        A call without operands is computed by its readers.
        """
        if node.op == "placeholder" or is_reshard(node) or is_alias(node) or _is_filled(node):
            return 0.0
        if node in self._shares:
            return self._moved(node, strategy)
        read = zip(operands(node), strategy.needs, strict=True)
        tensors = [(operand.meta["val"], need) for operand, need in read if not _is_filled(source_of(operand))]
        tensors += zip(results_of(node), strategy.results, strict=True)
        return sum(self.unit_costs.sizes.nbytes(tuple(t.shape), t.element_size(), layout) for t, layout in tensors)


def _is_filled(node: Node) -> bool:
    """Return whether a call, such as `full`, reads no tensors."""
    return node.op == "call_function" and not operands(node)


def _shares(region: tuple[Node, ...]) -> dict[Node, _Share]:
    inside, seen = set(region), set[Node]()
    found = {}
    for number, node in enumerate(region):
        reads = []
        for operand in operands(node):
            source = source_of(operand)
            reads.append(0 if source in inside or source in seen else bytes_read(node, operand))
            seen.add(source)
        writes = tuple(t.numel() * t.element_size() if _is_read_outside(node, inside) else 0 for t in results_of(node))
        found[node] = _Share(tuple(reads), writes, number == 0)
    return found


def _is_read_outside(node: Node, inside: set[Node]) -> bool:
    return any(_is_read_outside(user, inside) if is_alias(user) else user not in inside for user in node.users)
