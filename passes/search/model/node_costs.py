"""Cost the nodes of a graph: seconds and bytes of each with a strategy, on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
from torch.fx import Node

from passes._torch import OpOverload
from passes.cost.collective_time import collective_seconds, link_of
from passes.cost.fused_regions import is_alias
from passes.cost.kernel_time import kernel_seconds
from passes.cost.optimizer_step import passes_over
from passes.cost.program import ACROSS, INSIDE
from passes.ir.call import Call, Tensor, call_of
from passes.ir.collectives import SEND, Where
from passes.ir.graph import is_reshard, operands, tensor_of
from passes.ir.layout import Layout, R, replicated
from passes.ir.padding import PADS
from passes.recipes.context_parallel import POSITIONS, ring_messages, sharded_seconds
from passes.rules.attention import is_attention, is_attention_backward, operand_names
from passes.rules.rule import space_of
from passes.search.model.factor_graph import Floats
from passes.search.model.local_sizes import LocalSizes
from passes.search.model.node_bytes import NodeBytes
from passes.search.model.step_structure import StepStructure
from passes.search.model.strategies import Strategy
from passes.search.model.unit_costs import UnitCosts


class NodeCosts:
    """The costs of the nodes of one graph. A parameter costs its update by `optimizer` if it is trained."""

    def __init__(self, structure: StepStructure, unit_costs: UnitCosts, optimizer: str | None) -> None:
        self.unit_costs = unit_costs
        self._bytes = NodeBytes.of(structure, unit_costs.sizes, optimizer)
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
        """Return, per strategy, seconds [of the call, on each link], bytes of a parameter's state [moment, strategy], of a call's
        results, and of what a call works on."""
        if node not in self._keys:
            self._keys[node] = self._key(node)
        key = self._keys[node], id(strategies)
        if key not in self._sizes:
            sizes = self._bytes.state, self._bytes.results, self._bytes.working
            state, results, working = (np.array([one(node, strategy) for strategy in strategies]) for one in sizes)
            self._sizes[key] = strategies, (state.T, results, working)  # `strategies`: so that their id stays theirs
        if key not in self._times:
            self._times[key] = np.array([self._times_of(node, strategy) for strategy in strategies]).T
        return self._times[key], *self._sizes[key][1]

    def _key(self, node: Node) -> object:
        if node.op == "placeholder":
            return node
        return repr(call_of(node)) if isinstance(node.target, OpOverload) else node.target, self._bytes.shares.get(node)

    def _times_of(self, node: Node, strategy: Strategy) -> tuple[float, float, float]:
        """Return the seconds of a node, and those that what it sends by itself takes on links in nodes and between them."""
        sent = list(self._messages(node, strategy))
        inside, across = (sum(seconds for where, seconds in sent if where == link) for link in (INSIDE, ACROSS))
        return self._seconds(node, strategy), inside, across

    def _seconds(self, node: Node, strategy: Strategy) -> float:
        """Return the seconds of a call; of a parameter, those of its update by the optimizer."""
        sizes, hardware = self._bytes, self.unit_costs.hardware
        if node.op == "placeholder":
            moved = passes_over(sizes.optimizer) * sizes.stored(node, strategy) if sizes.is_trained(node) else 0.0
            return moved / hardware.memory_bandwidth
        if is_reshard(node) or is_alias(node):
            return 0.0
        if node in sizes.shares:
            launch = hardware.launch if sizes.shares[node].launches else 0.0
            return sizes.moved(node, strategy) / hardware.memory_bandwidth + launch
        halos = sum(seconds for _, seconds in self._halos(node, strategy))
        return self._kernel_seconds(self._call(node), strategy) + halos

    def seconds_alone(self, node: Node, strategy: Strategy) -> float:
        """Return the seconds of a kernel or an update without what it sends, which may hide.

        An attention whose positions are sharded takes its part of the time that it takes with whole ones, at least, and the
        update of a parameter its part of all: one that no axis divides may be stored in parts that are padded.
        """
        if node.op == "placeholder":
            whole = Strategy((), (replicated(self.unit_costs.mesh),))
            return self._seconds(node, whole) / self.unit_costs.mesh.size
        call, unit_costs, ranks = self._call(node), self.unit_costs, 1
        if is_attention(call.op) or is_attention_backward(call.op):
            queries = strategy.needs[operand_names(call).index("query")]
            ranks = math.prod(unit_costs.mesh.sizes[axis] for axis in queries.axes_on(POSITIONS))
            strategy = _with_whole_positions(strategy)
        return kernel_seconds(local_call(call, strategy, unit_costs.sizes), unit_costs.hardware) / ranks

    def _call(self, node: Node) -> Call:
        if node not in self._calls:
            self._calls[node] = call_of(node)
        return self._calls[node]

    def _messages(self, node: Node, strategy: Strategy) -> Iterator[tuple[Where, float]]:
        """Yield the link and the seconds of what a rank sends so that a call can read other parts of a sharded dim."""
        if node.op == "placeholder" or is_reshard(node) or is_alias(node) or node in self._bytes.shares:
            return
        yield from self._halos(node, strategy)
        call = self._call(node)
        queries, keys = _queries_and_keys(call, strategy)
        if queries is not None and keys is not None and keys.axes_on(POSITIONS):
            whole = local_call(call, _with_whole_positions(strategy), self._bytes.sizes)
            yield ring_messages(whole, queries, keys, self.unit_costs.mesh, self.unit_costs.hardware)

    def _halos(self, node: Node, strategy: Strategy) -> Iterator[tuple[Where, float]]:
        space = space_of(node)
        for factor, reach in space.reaches.items() if space is not None else ():
            for sent in reach.sends:
                yield self._halo(node, strategy, factor, *sent)

    def _halo(self, node: Node, strategy: Strategy, factor: str, kind: str, operand: int, elements: int) -> tuple[Where, float]:
        """Return the link and the seconds in which a rank sends `elements` of its part of an operand, if `factor` is sharded."""
        space, tensor, layout = space_of(node), tensor_of(operands(node)[operand]), strategy.needs[operand]
        assert space is not None
        dim = next(dim for dim, factors in enumerate(space.operands[operand]) if factor in factors)
        axes = layout.axes_on(dim)
        if not axes:
            return "inside", 0.0
        mesh, hardware = self.unit_costs.mesh, self.unit_costs.hardware
        group = mesh.group_shape(tuple(mesh.names[axis] for axis in axes))
        part = self._bytes.sizes.nbytes(tuple(tensor.shape), tensor.element_size(), layout)
        nbytes = part * elements * group.ranks / tensor.shape[dim]
        return link_of(group), collective_seconds(kind, nbytes if kind == SEND.name else nbytes * group.ranks, group, hardware)

    def _kernel_seconds(self, call: Call, strategy: Strategy) -> float:
        sizes, hardware = self._bytes.sizes, self.unit_costs.hardware
        if call.op in PADS and strategy.results[0].axes_on(call.arg("dim")):
            return 0.0  # parts are stored with their padding
        queries, keys = _queries_and_keys(call, strategy)
        if queries is not None and keys is not None and (call.arg("is_causal") or keys.axes_on(POSITIONS)):
            whole = local_call(call, _with_whole_positions(strategy), sizes)
            return sharded_seconds(whole, queries, keys, self.unit_costs.mesh, hardware)
        return kernel_seconds(local_call(call, strategy, sizes), hardware)


def _queries_and_keys(call: Call, strategy: Strategy) -> tuple[Layout, Layout] | tuple[None, None]:
    """Return the layouts of an attention's queries and keys, if queries are sharded by position."""
    if not (is_attention(call.op) or is_attention_backward(call.op)):
        return None, None
    names = operand_names(call)
    queries, keys = (strategy.needs[names.index(name)] for name in ("query", "key"))
    return (queries, keys) if queries.axes_on(POSITIONS) else (None, None)


def _with_whole_positions(strategy: Strategy) -> Strategy:
    """Return an attention's strategy with the part of batch and heads alone."""

    def whole(layout: Layout) -> Layout:
        for axis in layout.axes_on(POSITIONS):
            layout = layout.with_on(axis, R)
        return layout

    return Strategy(tuple(map(whole, strategy.needs)), tuple(map(whole, strategy.results)))


def local_call(call: Call, strategy: Strategy, sizes: LocalSizes) -> Call:
    """Return the call that one rank makes."""
    needs = list(strategy.needs)
    args, kwargs = _local_argument(call.args, needs, sizes), _local_argument(call.kwargs, needs, sizes)
    results = tuple(_part(t, layout, sizes) for t, layout in zip(call.results, strategy.results, strict=True))
    return Call(call.op, args, kwargs, results)


def _local_argument(value: Any, needs: list[Layout], sizes: LocalSizes) -> Any:
    """Return an argument with one rank's part of each tensor, whose layouts are taken off `needs` in order."""
    if isinstance(value, Tensor):
        return _part(value, needs.pop(0), sizes)
    if isinstance(value, tuple | list):
        return tuple(_local_argument(item, needs, sizes) for item in value)
    if isinstance(value, Mapping):
        return {key: _local_argument(item, needs, sizes) for key, item in value.items()}
    return value


def _part(tensor: Tensor, layout: Layout, sizes: LocalSizes) -> Tensor:
    return Tensor(sizes.local(tensor.shape, layout), tensor.dtype)
