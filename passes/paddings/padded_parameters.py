"""Choose the dims to pad: rows of embedding tables, and columns of linears that begin a sharded stretch of the forward.

The columns of a linear are followed through the forward, as tensor parallelism would carry their sharding: views and slices
on the way say which digit of them an axis can shard (whole heads, inside each part of a fused projection). A linear that
contracts columns is left as it is, since it is sharded by rows, and so is one whose columns meet a value that other calls
leave whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from passes.ir.graph import item_of, operands, results_of, tensor_of
from passes.ir.padding import Digit, Padded, Padding, in_dims, in_factor, is_gain, padded_size
from passes.paddings.generated import is_generated
from passes.recipes.megatron.carry import carry_shardings
from passes.recipes.megatron.linears import Linear, find_linears, forward_nodes
from passes.recipes.megatron.stream import depends_on_input
from passes.recipes.weights import weights_of
from passes.rules.rule import Space, space_of

aten = torch.ops.aten


def padded_parameters(gm: GraphModule, parts: int) -> tuple[Padded, ...]:
    """Return the parameters to pad so that `parts` divides what they make, in the order of their users."""
    weights, forward = weights_of(gm.graph), forward_nodes(gm)
    linears = find_linears(forward, weights)
    found: dict[Node, Padded] = {}
    columns = _Columns(linears, weights, forward)
    odd = {node: digit for node, digit in columns.found.items() if is_gain(digit.size, parts)}
    if odd:
        carry = carry_shardings(forward, linears, weights, parts)
        odd = {node: digit for node, digit in odd.items() if node not in carry.columns and node not in carry.rows}
    for node in forward:
        if node in odd:
            wanted = _of_columns(linears[node], odd[node], weights)
        elif node.target is aten.embedding.default:
            wanted = _of_rows(node, weights, parts)
        else:
            continue
        if wanted is not None:
            parameter, dim, digit = wanted
            padding = Padding(dim, digit, padded_size(digit.size, parts))
            found.setdefault(parameter, Padded(parameter, padding, node))
    return tuple(found.values())


def _of_rows(node: Node, weights: dict[Node, Node], parts: int) -> tuple[Node, int, Digit] | None:
    """Return the parameter, dim and digit that the rows of an embedding table are, if inputs index it."""
    table, index = operands(node)[:2]
    rows = tensor_of(table).shape[0]
    if table not in weights or not depends_on_input(index) or not is_gain(rows, parts):
        return None
    return _of_parameter(table, 0, Digit(1, rows, 1), weights)


def _of_columns(linear: Linear, digit: Digit, weights: dict[Node, Node]) -> tuple[Node, int, Digit] | None:
    found = in_dims(linear.space.sizes, linear.space.operands[linear.weight], linear.columns, digit)
    assert found is not None
    return _of_parameter(linear.w, *found, weights)


def _of_parameter(
    value: Node, dim: int, digit: Digit, weights: dict[Node, Node]
) -> tuple[Node, int, Digit] | None:
    """Return the parameter of which `value` is a form, and the dim and digit of it that give those of `value`; None if
    there are none."""
    while value is not weights[value]:
        if value.target is aten.slice.Tensor:  # padding would be added to all parts
            return None
        space = space_of(value)
        at = None if space is None else in_factor(space.sizes, space.results[0], dim, digit)
        found = None if space is None or at is None else in_dims(space.sizes, space.operands[0], *at)
        if found is None:
            return None
        (dim, digit), value = found, operands(value)[0]
    return value, dim, digit


@dataclass(frozen=True)
class _Held:
    """A digit of columns in a value: its place there, and the digit of the columns of each linear that it comes from."""

    dim: int
    digit: Digit
    sources: dict[Node, Digit] = field(default_factory=dict)


class _Columns:
    """The digits of columns that the forward carries on, by the linear that makes them, in `found`."""

    def __init__(self, linears: dict[Node, Linear], weights: dict[Node, Node], forward: tuple[Node, ...]) -> None:
        self.weights = weights
        self.found: dict[Node, Digit] = {}
        self.given_up: set[Node] = set()
        self.held: dict[Node, tuple[_Held | None, ...]] = {}
        for node in forward:
            if node in linears and not self._carried(linears[node].x):
                self._begin(linears[node])
            elif any(self._carried(value) for value in operands(node)):
                self._carry(node)
        for node in self.given_up:
            self.found.pop(node, None)

    def _carried(self, value: Node) -> bool:
        return any(one is not None for one in self.held.get(value, ()))

    def _begin(self, linear: Linear) -> None:
        digit = Digit(1, linear.column_count, 1)
        placed = in_dims(linear.space.sizes, linear.space.results[0], linear.columns, digit)
        assert placed is not None
        self.found[linear.node] = digit
        self.held[linear.node] = (_Held(*placed, {linear.node: digit}),)

    def _carry(self, node: Node) -> None:
        if (item := item_of(node)) is not None:
            self.held[node] = (self.held[item[0]][item[1]],)
            return
        space, inputs = space_of(node), operands(node)
        results: list[_Held | None] = [None] * len(results_of(node))
        for i, value in enumerate(inputs):
            held = self.held.get(value, (None,))[0]
            if held is None:
                continue
            finer = None if space is None else _finer(space, i, held)
            if space is None or finer is None or not self._others_follow(space, inputs, *finer):
                self._give_up(held)
                continue
            self._refine(held, *finer, space, results)
        self.held[node] = tuple(results)

    def _refine(
        self, held: _Held, factor: str, digit: Digit, found: Digit, space: Space, results: list[_Held | None]
    ) -> None:
        """Place the digit in the results; `found` is what it is in the value that held it."""
        sources: dict[Node, Digit] = {}
        for source, before in held.sources.items():
            whole = self.found[source].length
            outer = before.outer * (found.outer // held.digit.outer)
            sources[source] = Digit(outer, found.size, whole // (outer * found.size))
            joined = _joined(self.found[source], sources[source])
            if joined is None:
                self.given_up.add(source)
            else:
                self.found[source] = joined
        for i, dims in enumerate(space.results):
            placed = in_dims(space.sizes, dims, factor, digit)
            if placed is not None:
                other = results[i]
                results[i] = _Held(*placed, sources | (other.sources if other is not None else {}))

    def _others_follow(self, space: Space, inputs: tuple[Node, ...], factor: str, digit: Digit, _: Digit) -> bool:
        """Return whether other operands with the factor are weights, carry it too, or are made without data."""
        for value, dims in zip(inputs, space.operands, strict=True):
            placed = in_dims(space.sizes, dims, factor, digit)
            if placed is None or self._carried(value) or value in self.weights:
                continue
            if not is_generated(value, *placed, space_of):
                return False
        return True

    def _give_up(self, held: _Held) -> None:
        self.given_up.update(held.sources)


def _joined(one: Digit, other: Digit) -> Digit | None:
    """Return the finer of two digits of one index, None if neither is part of the other."""
    for fine, coarse in ((one, other), (other, one)):
        if fine.outer % coarse.outer == 0 and fine.outer >= coarse.outer and coarse.end % fine.end == 0:
            return fine
    return None


def _finer(space: Space, operand: int, held: _Held) -> tuple[str, Digit, Digit] | None:
    """Return the first factor in a held digit that may be sharded, the digit in the factor, and in the operand's dim."""
    if not all(space.sizes[factor] for factor in space.operands[operand][held.dim]):
        return None
    before = 1
    for factor in space.operands[operand][held.dim]:
        length = space.sizes[factor]
        after = before * length
        if space.can_pad(factor, 1) and before >= held.digit.outer and held.digit.end % after == 0:
            inner = held.digit.length // after
            return factor, Digit(1, length, 1), Digit(before, length, inner)
        if held.digit.outer % before == 0 and after % held.digit.end == 0:
            inside = Digit(held.digit.outer // before, held.digit.size, after // held.digit.end)
            if space.can_pad(factor, inside.outer):
                return factor, inside, held.digit
        before = after
    return None


