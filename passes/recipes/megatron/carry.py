"""Carry the sharding of column-parallel linears through the forward, to the row-parallel linears that contract it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from passes.ir.graph import is_reshard, item_of, operands, results_of, tensor_of
from passes.ir.layout import Placement, R, Shard
from passes.recipes.megatron.linears import Linear, digits_of
from passes.recipes.weights import on_form, on_parameter, resized_form
from passes.rules.rule import Row, factor_row, row_sharding, space_of

aten = torch.ops.aten


def carry_shardings(forward: tuple[Node, ...], linears: dict[Node, Linear], weights: dict[Node, Node], size: int) -> Carry:
    """Carry shardings through the forward, again with fewer ways until none is blocked."""
    ways = Ways.of(linears, size)
    while not (found := Carry(forward, linears, weights, size, ways)).is_complete:
        pass
    return found


class Carry:
    """The shardings carried through the forward in one walk.

    Linears are visited in program order. If an op cannot carry a sharding on, one of the linears that it came from tries
    its next digit, or stays whole, and the forward is walked again. Each walk removes one digit, so this terminates.

    A low-rank adapter, `base(x) + B(A(x))` as in LoRA (Hu et al. 2021), is not treated as a block of two linears: with
    `A` by columns and `B` by rows its result would be whole, while that of a column-parallel base is sharded. So `A`,
    which has few columns, stays whole, and `B` is sharded like the base.

    The result of a row-parallel convolution is scattered over its channels, which norms, activations and the next
    convolution take as they are: all of a network is sharded on its channels. If an op cannot carry that on, the result
    is whole.

    A weight that one product uses by columns and whose columns come back as the activation of another, as the hidden
    state of a recurrent network does, is used by columns again: the activation is gathered.
    """

    def __init__(
        self, forward: tuple[Node, ...], linears: dict[Node, Linear], weights: dict[Node, Node], size: int, ways: Ways
    ) -> None:
        self.linears, self.weights, self.size, self.ways = linears, weights, size, ways
        self.carried: dict[Node, tuple[Placement | None, ...]] = {}
        self.sources: dict[Node, tuple[Node, ...]] = {}
        self.columns: dict[Node, Placement] = {}  # linear -> placement of its weight
        self.rows: dict[Node, Placement] = {}
        self.gathered: dict[Node, Node] = {}  # activation that is gathered -> the linear that it is for
        self.stream: dict[Node, None] = {}  # values of the residual stream, between blocks
        self.through: dict[Node, tuple[Node, ...]] = {}  # result of a row-parallel linear -> columns that it contracts
        self.stored = StoredWeights(weights, size)
        self.is_complete = all(self._linear(linears[n]) if n in linears else self._op(n) for n in forward)

    def _linear(self, linear: Linear) -> bool:
        carried = self._of(linear.x)
        if isinstance(carried, Shard):
            return self._row(linear, carried)
        if not self.ways.digits[linear.node]:
            self.stream[linear.node] = None
            return True
        return self._column(linear)

    def _row(self, linear: Linear, carried: Shard) -> bool:
        node = linear.node
        row = row_sharding(linear.space, linear.activation, carried, self.size)
        if row is None:
            return self._blocked(node)
        need = row.operands[linear.weight]
        if not isinstance(need, Shard):
            return self._carry_on(node, row)
        if self._is_by_columns(linear):
            del self.carried[linear.x]
            self.gathered[linear.x] = node
            return self._column(linear)
        if not self.stored.place(linear.w, need, node):
            return self._blocked(node)
        self.rows[node] = need
        if node in self.ways.scattered:
            self.carried[node], self.sources[node] = (Shard(linear.column_dim),), (node,)
            return True
        self.stream[node] = None
        self.through[node] = self.sources[linear.x]
        return True

    def _is_by_columns(self, linear: Linear) -> bool:
        """Return whether an earlier product uses the same weight by columns."""
        _, by = self.stored.placed.get(self.weights[linear.w], (None, None))
        return by in self.columns and linear.node not in self.ways.scattered

    def _column(self, linear: Linear) -> bool:
        """Shard a linear by columns, at the first digit that its weight can have."""
        node = linear.node
        while self.ways.digits[node]:
            row = factor_row(linear.space, linear.columns, self.ways.digits[node][0], self.size)
            if row is not None and self.stored.place(linear.w, row.operands[linear.weight], node):
                break
            self.ways.drop(node, is_row=False)
        else:
            self.stream[node] = None
            return True
        self.columns[node] = row.operands[linear.weight]
        self.carried[node], self.sources[node] = row.results, (node,)
        return True

    def _op(self, node: Node) -> bool:
        inputs = operands(node)
        if not any(isinstance(p, Shard) for i in inputs for p in self.carried.get(i, ())):
            if results_of(node)[0].is_floating_point() and self._is_stream(node, inputs):
                self.stream[node] = None
                self._pass_through(node, inputs)
            return True
        if (item := item_of(node)) is not None or is_reshard(node):  # a reshard constrains an output, on whichever axis
            source, position = item or (inputs[0], 0)
            self.carried[node] = (self.carried[source][position],)
            self.sources[node] = self.sources[source]
            return True
        row = _row_of(node, [self._of(value) for value in inputs], self.size)
        return self._carry_on(node, row) if row is not None else self._blocked(node)

    def _is_stream(self, node: Node, inputs: tuple[Node, ...]) -> bool:
        return node.target is aten.embedding.default or any(i in self.stream for i in inputs)

    def _pass_through(self, node: Node, inputs: tuple[Node, ...]) -> None:
        """Follow the result of a row-parallel linear through a view, a scale or a bias, up to a sum with another
        value."""
        values = [value for value in inputs if value in self.stream]
        if len(values) == 1 and values[0] in self.through:
            self.through[node] = self.through[values[0]]

    def _carry_on(self, node: Node, row: Row) -> bool:
        """Use `row` at `node` if its other operands can follow."""
        inputs = operands(node)
        for value, need in zip(inputs, row.operands, strict=True):
            have = self._of(value)
            if have == need or (have is None and not isinstance(need, Shard)):
                continue
            if have is None and self._is_adapted(value, node):
                return False
            if have is not None or value in self.stream:
                return self._blocked(node)
            if value in self.weights and not self.stored.place(value, need, node):
                return self._blocked(node)
        self.carried[node] = tuple(p if isinstance(p, Shard) else None for p in row.results)
        self.sources[node] = tuple(dict.fromkeys(s for v in inputs for s in self.sources.get(v, ())))
        return True

    def _of(self, value: Node) -> Placement | None:
        return self.carried.get(value, (None,))[0]

    def _blocked(self, node: Node) -> bool:
        """Let a linear whose sharding cannot pass `node` try something else: the one with most left to try."""
        sources = [source for value in operands(node) for source in reversed(self.sources.get(value, ()))]
        source = max(sources, key=lambda linear: self.ways.left(linear, is_row=linear in self.rows))
        self.ways.blockers.setdefault(source, node)
        self.ways.drop(source, is_row=source in self.rows)
        return False

    def _is_adapted(self, value: Node, node: Node) -> bool:
        """Keep `A` whole if `value`, which `node` adds to a sharded one, is a low-rank `B(A(x))`."""
        ranks = self.through.get(value, ())
        if len(ranks) != 1 or self.linears[ranks[0]].column_count >= tensor_of(value).shape[-1]:
            return False
        self.ways.keep_whole(ranks[0], node)
        return True


def _row_of(node: Node, placements: list[Placement | None], size: int) -> Row | None:
    """Return the row of a call whose first sharded operand stays as it is; None if it has none."""
    space = space_of(node)
    if space is None:
        return None
    first, placement = next((i, one) for i, one in enumerate(placements) if isinstance(one, Shard))
    return row_sharding(space, first, placement, size)


@dataclass
class Ways:
    """The ways to shard that each linear has left, over all walks."""

    digits: dict[Node, tuple[int, ...]]  # of its columns
    scattered: set[Node]  # whose result is scattered over its columns if they are row-parallel
    blockers: dict[Node, Node] = field(default_factory=dict)  # linear -> the first call that its columns do not pass
    adapters: dict[Node, Node] = field(default_factory=dict)  # the `A` of an adapter -> the sum of the base and `B`

    @staticmethod
    def of(linears: dict[Node, Linear], size: int) -> Ways:
        """Return all ways: only convolutions scatter their results."""
        digits = {node: digits_of(linear, size) for node, linear in linears.items()}
        scattered = {node for node, one in linears.items() if one.is_convolution and one.column_count % size == 0}
        return Ways(digits, scattered)

    def left(self, linear: Node, *, is_row: bool) -> int:
        """Count the ways that a linear has left: the digits of its columns, or a result that is not scattered."""
        return int(linear in self.scattered) if is_row else len(self.digits[linear])

    def keep_whole(self, linear: Node, adapted: Node) -> None:
        """Leave out all digits of the `A` of an adapter, which the sum `adapted` ends."""
        self.adapters[linear] = adapted
        self.digits[linear] = ()

    def drop(self, linear: Node, *, is_row: bool) -> None:
        """Leave out the result's scattering, or the digit, that failed."""
        assert self.left(linear, is_row=is_row), f"{linear} is blocked, but carries no sharding"
        if is_row:
            self.scattered.remove(linear)
        else:
            self.digits[linear] = self.digits[linear][1:]


class StoredWeights:
    """Decide how parameters are stored, for the shardings of one walk."""

    def __init__(self, weights: dict[Node, Node], size: int) -> None:
        self.weights, self.size = weights, size
        self.unequal = _cut_unequally(weights)
        self.placed: dict[Node, tuple[Placement, Node]] = {}  # parameter placeholder -> placement, by whom
        self.moved: dict[Node, Placement] = {}  # padded form or part of a parameter -> the placement that it is moved to

    def place(self, value: Node, placement: Placement, by: Node) -> bool:
        """Shard the parameter of which `value` is a form; return False if it cannot be, or already is otherwise."""
        parameter = self.weights[value]
        wanted = None
        if parameter not in self.unequal:
            wanted = on_parameter(value, placement, self.weights, self.size)
        if wanted is None:
            wanted = self._moved(value, placement)
        if wanted is None:
            return False
        return self.placed.setdefault(parameter, (wanted, by))[0] == wanted

    def _moved(self, value: Node, placement: Placement) -> Placement | None:
        """Return how to store a parameter that is padded or cut and then moved, so that its form `value` has
        `placement`.

        One that is cut is stored in parts of another dim, as all its parts then are.
        """
        form = resized_form(value, self.weights)
        used = None if form is None else on_form(value, placement, form, self.size)
        if form is None or used is None:
            return None
        self.moved[form] = used
        space, source = space_of(form), operands(form)[0]
        assert space is not None
        before, after = tensor_of(source).shape, tensor_of(form).shape
        rows = (factor_row(space, factor, 1, self.size) for factor in space.sizes)
        tries = [row.operands[0] for row in rows if row is not None]
        if form.target is aten.slice.Tensor:
            tries = [at for at in tries if isinstance(at, Shard) and before[at.dim] == after[at.dim]]
        found = (on_parameter(source, at, self.weights, self.size) for at in tries)
        return next((at for at in found if at is not None), R)


def _cut_unequally(weights: dict[Node, Node]) -> set[Node]:
    """Return the parameters that slices take parts of different shapes from: no sharding of one gives that of all its
    parts."""
    shapes: dict[Node, set[tuple[int, ...]]] = {}
    for value, parameter in weights.items():
        if value.target is aten.slice.Tensor:
            shapes.setdefault(parameter, set()).add(tuple(tensor_of(value).shape))
    return {parameter for parameter, found in shapes.items() if len(found) > 1}
