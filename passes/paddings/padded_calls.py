"""Make the calls of a graph on padded values.

A call whose rule has the padded digit in an index that may be sharded is made on the longer dim: operands that have the
index too are padded, shape arguments follow, and its results are padded. Where it reduces the index, the padding is first
overwritten with what the reduction ignores: 0 for sums and products of matrices, the least value for a maximum. Any other
call gets its operands without padding.

Padding is zero or unknown. It stays zero through ops that are linear, and through pointwise ones that are zero at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from passes._torch import OpOverload, fake_mode_of
from passes.ir.call import Call, call_of
from passes.ir.fake_calls import fake_call
from passes.ir.graph import (
    InputRole,
    OutputRole,
    input_of,
    item_of,
    operands,
    output_node,
    outputs_of,
    placeholders,
    results_of,
    returned,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.layout import Layout, replicated
from passes.ir.mesh import Mesh
from passes.ir.padding import PADS, Padding, in_factor
from passes.normal_forms import At
from passes.paddings.generated import is_generated
from passes.paddings.padded_attention import opened, set_lengths
from passes.paddings.padded_factors import Paddings, fill_of, longer, makes_zeros, padded_factors, paddings_of
from passes.paddings.padded_values import PaddedValues
from passes.recipes.weights import weights_of
from passes.rules.rule import LocalCall, Message, Space, rule_of, space_of

aten = torch.ops.aten
prims = torch.ops.prims

# Arguments that are sizes of results, of ops whose local form reads a part's size elsewhere:
_SIZES = {aten.embedding_dense_backward.default: (2, 0), prims.iota.default: (0, 0)}  # op -> argument, dim
_LOOKUPS = (aten.gather.default, aten.embedding.default, aten.index_select.default)  # of elements that are not padding


class PaddedCalls:
    """Rewrites a graph, given the values that are padded first."""

    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        self.graph: Graph = gm.graph
        self.mesh, self.whole = mesh, replicated(mesh)
        self.fake_mode = fake_mode_of([value_of(n) for n in placeholders(gm.graph)])
        self.values = PaddedValues(gm.graph, self.fake_mode)
        self.weights = weights_of(gm.graph)
        self.spaces: dict[Node, Space | None] = {}  # of calls on values as they were
        self.calls: dict[Node, Call] = {}
        self.longer: dict[Node, Node] = {}  # parameters, and forms of them, that were padded for an earlier call
        self.made_longer: dict[tuple[Node, Padding], Node] = {}  # copies of calls that take no data along a padded dim
        self.items: dict[Node, list[dict[Padding, bool]]] = {}  # paddings of each result of a call with several
        for node in gm.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                self.spaces[node], self.calls[node] = space_of(node), call_of(node)

    def run(self, given: Sequence[tuple[Node, Padding, Node]]) -> None:
        """Rewrite the graph with those parameters padded, each for the call that follows it."""
        nodes = list(self.graph.nodes)
        _pad(self.values, given)
        for node in nodes:
            if node.op == "call_function":
                for value in node.all_input_nodes:
                    node.replace_input_with(value, self._latest(value))
                if any(map(self._is_padded, node.all_input_nodes)):
                    self._call(node, {})
        self.values.share_zeros()
        self._return([(_gradient_of(node), padding) for node, padding, _ in given])
        _drop_unused(self.graph)

    def _latest(self, value: Node) -> Node:
        while value in self.longer:
            value = self.longer[value]
        return value

    def _is_padded(self, value: Node) -> bool:
        return bool(self.values.of(value)) or value in self.items

    def _call(self, node: Node, forced: Paddings) -> Node:
        """Make a call on padded operands, and return it; `forced` are factors that are padded even if no operand is."""
        if (item := item_of(node)) is not None:
            source, position = item
            set_value(node, results_of(source)[position])
            self.values.held[node] = self.items[source][position]
            return node
        space, joined = self.spaces.get(node), dict(forced)
        if space is not None and (one := opened(At(self.graph, node, self.fake_mode), self.calls[node], space, self.values)):
            self.calls[node], self.spaces[node], joined = one.call, one.space, forced | one.factors
            space = one.space
        before = node.args, node.kwargs
        factors = {} if space is None else padded_factors(node, space, self.values, joined)
        if space is not None and factors:
            try:
                return self._resized(node, space, factors)
            except (_DeclinedError, RuntimeError):
                if forced:
                    raise
                node.args, node.kwargs = before
        _replace_operands(node, [self.values.whole(value) for value in operands(node)])
        return node

    def _resized(self, node: Node, space: Space, factors: Paddings) -> Node:
        wanted = [paddings_of(space, dims, factors) for dims in space.operands]
        new = [self._operand(number, wanted[number], node, space) for number in range(len(wanted))]
        zero = {factor: makes_zeros(node, space, factor, new, factors, self.values) for factor in factors}
        _replace_operands(node, new)
        results = [paddings_of(space, dims, factors) for dims in space.results]
        shapes = [longer(one.shape, some.values()) for one, some in zip(self.calls[node].results, results, strict=True)]
        made = _make(self, node, shapes)
        if [tuple(result.shape) for result in results_of(made)] != shapes:
            raise _DeclinedError(node)
        held = [{padding: zero[factor] for factor, padding in some.items()} for some in results]
        if isinstance(value_of(made), torch.Tensor):
            self.values.held[made] = held[0]
        else:
            self.items[made] = held
        return made

    def _operand(self, number: int, wanted: Mapping[str, Padding], node: Node, space: Space) -> Node:
        """Return an operand with the paddings of its factors, and no others."""
        value = operands(node)[number]
        for padding in list(self.values.of(value)):
            if padding not in wanted.values():
                value = self.values.cut(value, padding)
        is_looked_up = node.target in _LOOKUPS and number == 0
        for factor, padding in wanted.items():
            value = self._padded(value, padding, node)
            fill = None if is_looked_up else fill_of(node, space, factor, number, tensor_of(value).dtype)
            if fill is not None and not (fill == 0 and self.values.of(value)[padding]):
                value = self.values.masked(value, padding, fill)
        return value

    def _padded(self, value: Node, padding: Padding, user: Node) -> Node:
        """Return `value` with padding; if it is made without data along the dim, or a form of a parameter, make it
        longer."""
        if padding in self.values.of(value):
            return value
        made = self.made_longer.get((value, padding)) or self._remade(value, padding, user)
        if value in self.weights:
            self.longer[value] = made
        return made

    def _remade(self, value: Node, padding: Padding, user: Node) -> Node:
        space = self._plain_space(value)
        at = None if space is None else in_factor(space.sizes, space.results[0], padding.dim, padding.digit)
        is_form = value in self.weights and value.op != "placeholder"
        if at is None or not (is_form or is_generated(value, padding.dim, padding.digit, self._plain_space)):
            return self.values.padded(value, padding, user)
        with self.graph.inserting_after(value):
            copied = self.graph.node_copy(value)
        self.spaces[copied], self.calls[copied] = space, self.calls[value]
        return self.made_longer.setdefault((value, padding), self._call(copied, {at[0]: (at[1], padding.padded)}))

    def _plain_space(self, node: Node) -> Space | None:
        """Return the index space of a call without padding."""
        return None if self._is_padded(node) else self.spaces.get(node)

    def _return(self, wanted: Sequence[tuple[str, Padding]]) -> None:
        """Return values without padding. A gradient that could be made longer is, as its parameter may be sharded."""
        values: list[Any] = []
        for value, output in zip(returned(self.graph), outputs_of(self.graph), strict=True):
            is_gradient = isinstance(value, Node) and output.role is OutputRole.GRADIENT
            for padding in [padding for name, padding in wanted if is_gradient and name == output.name]:
                if not self.values.of(value) and is_generated(value, padding.dim, padding.digit, self._plain_space):
                    value = self._padded(value, padding, value)
            values.append(self.values.whole(value) if isinstance(value, Node) else value)
        output_node(self.graph).args = (tuple(values),)


def _pad(values: PaddedValues, given: Sequence[tuple[Node, Padding, Node]]) -> None:
    """Pad parameters and inputs, some of them in several dims, before all calls that take them."""
    users = {node: [user for user in node.users if user.op != "output"] for node, _, _ in given}
    padded = {node: node for node in users}
    for node, padding, first in given:
        padded[node] = values.padded(padded[node], padding, first)
    for node, value in padded.items():
        for user in users[node]:
            user.replace_input_with(node, value)


def _look_beyond_padding(calls: PaddedCalls, lookup: Node) -> None:
    """Replace numbers of padding, which name no element, by one beyond it: the lookup fails as it does without padding."""
    call, (table, index) = calls.calls[lookup], operands(lookup)
    size, at = call.operands[0].shape, At(calls.graph, lookup, calls.fake_mode)
    dim = 0 if call.op is aten.embedding.default else call.arg("dim") % len(size)
    for padding in calls.values.of(table):
        if padding.dim == dim:
            is_padding = at.call(aten.ge.Scalar, index, size[dim])
            masked = at.call(aten.masked_fill.Scalar, index, is_padding, padding.length)
            calls.values.held[masked] = dict(calls.values.of(index))
            lookup.replace_input_with(index, masked)


def _make(calls: PaddedCalls, node: Node, shapes: list[tuple[int, ...]]) -> Node:
    """Make the call with its new operands and with size arguments that give results of `shapes`."""
    set_lengths(node)
    if node.target in _LOOKUPS:
        _look_beyond_padding(calls, node)
    if node.target in _SIZES:
        position, dim = _SIZES[node.target]
        node.update_arg(position, shapes[0][dim])
    rule = None if node.target in PADS else rule_of(node.target)  # padding of other dims does not change what these do
    if rule is not None and rule.local is not None and node.target not in _SIZES:
        made = rule.local(_LongerCall(calls, node, shapes)) or node
        if not isinstance(made, Node):
            raise _DeclinedError(node)
        if made.target is not node.target:
            node.replace_all_uses_with(made)
            calls.graph.erase_node(node)
            calls.spaces[made], calls.calls[made] = calls.spaces[node], calls.calls[node]
            return made
        if made is not node:
            node.args, node.kwargs = made.args, made.kwargs
            calls.graph.erase_node(made)
    set_value(node, fake_call(calls.fake_mode, node.target, node.args, node.kwargs))
    return node


class _DeclinedError(Exception):
    """Raised where a call cannot be made on padded operands."""


class _LongerCall(LocalCall):
    """A call on padded operands, as the local form of its rule sees it: every rank has the whole, which is longer."""

    def __init__(self, calls: PaddedCalls, node: Node, shapes: list[tuple[int, ...]]) -> None:
        self._at, self._shapes, self._whole = At(calls.graph, node, calls.fake_mode), shapes, calls.whole
        self.mesh, self.call = calls.mesh, calls.calls[node]
        self.args, self.kwargs = tuple(node.args), dict(node.kwargs)
        self.operands = operands(node)

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return self._at.call(op, *args, **kwargs)

    def emit_copy(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return self.emit(op, *args, **kwargs)

    def send(self, op: OpOverload, *args: Any, axes: tuple[int, ...], message: Message) -> Node:
        raise _DeclinedError(self._at.node)

    def item(self, results: Node, number: int) -> Node:
        raise _DeclinedError(self._at.node)

    def local_shape(self, result: int = 0) -> tuple[int, ...]:
        return self._shapes[result]

    def operand_layout(self, operand: int) -> Layout:
        return self._whole

    def result_layout(self, result: int = 0) -> Layout:
        return self._whole

    def coordinate(self, axis: int) -> Node:
        raise _DeclinedError(self._at.node)

    def positions(self, layout: Layout, dim: int, size: int) -> Node:
        raise _DeclinedError(self._at.node)

    def seed(self) -> Node:
        raise _DeclinedError(self._at.node)

    def number(self) -> int:
        raise _DeclinedError(self._at.node)


def _replace_operands(node: Node, new: Sequence[Node]) -> None:
    tensors, following = set(operands(node)), iter(new)
    args, kwargs = map_arg((node.args, node.kwargs), lambda value: next(following) if value in tensors else value)
    node.args, node.kwargs = tuple(args), dict(kwargs)


def _gradient_of(node: Node) -> str:
    name = input_of(node).name
    return f"input:{name}" if input_of(node).role is InputRole.INPUT else name


def _drop_unused(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
