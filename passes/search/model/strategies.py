"""Enumerate the strategies of each node: rows on one axis, and from them a row per axis.

On one axis a node starts with the contiguous digit of each factor. Digits that its neighbours' placements imply
(the sequence inside a merged dim, the heads inside a projection) and partial rows are added until nothing changes.
A strategy takes a row per axis; axes that shard the same digit of one factor do so in either order. Axes of one group
take the same row, in mesh order.

Positions of attention are sharded where the mesh has an axis for them, or the sequence is long (`recipes.context_parallel`):
mirrored if the attention is causal, alone or in a ring with keys and values.

For large graphs, rows that never pay are left out: partial values are only multiplied by numbers, and are reduced
before a call after which they would have to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations, product

from torch.fx import Graph, Node

from passes.ir.graph import InputRole, input_of, is_reshard, item_of, operands, results_of, tensor_of
from passes.ir.layout import Layout, Partial, Placement, Shard
from passes.ir.mesh import Mesh
from passes.recipes.context_parallel import CONTEXT_AXES, causal_positions, is_long
from passes.rules.rule import (
    Dims,
    Row,
    Space,
    factor_at,
    factor_row,
    replicated_row,
    row_giving,
    row_sharding,
    space_of,
)
from passes.search.model.axis_groups import AxisGroups

ROWS = 12  # per node and axis, at most, as strategies multiply with the axes; digits beyond the first dozen are left out
Digit = tuple[int, int]  # the product of those before it in its factor, and its `mirror`
SWEEPS = 6  # over the graph, forward and backward, at most, until no neighbour implies a new row


@dataclass(frozen=True)
class Strategy:
    """One way to run a node on all axes: a layout per tensor operand and per tensor result."""

    needs: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class _AxisRow:
    """A row on one axis; a factor row knows its factor and digit, so that another axis can shard inside of it."""

    row: Row
    factor: str = ""
    digit: Digit = (1, 0)

    def is_like(self, other: _AxisRow) -> bool:
        """Return whether two rows are the same on axes of any size."""
        if self.factor or other.factor:
            return (self.factor, self.digit) == (other.factor, other.digit)
        return self.row == other.row


class Strategies:
    """The strategies of every node of a graph, enumerated on demand.

    With `splits_only`, they are those that split one factor on an axis, at one digit, by all rules: parts have no other sizes.
    """

    def __init__(self, rows: RowTables, mesh: Mesh, axis_groups: AxisGroups, *, splits_only: bool = False) -> None:
        self._mesh, self._axis_groups = mesh, axis_groups
        self._spaces = rows.spaces
        by_position = rows.is_long or any(name in CONTEXT_AXES for name in mesh.names)
        self._tables: dict[int, Mapping[Node, Sequence[_AxisRow]]] = {
            size: rows.splits(size) if splits_only else rows.table(size, by_position=by_position)
            for size in dict.fromkeys(mesh.sizes)
        }
        self._found: dict[object, tuple[Strategy, ...]] = {}  # alike calls have the same

    def of(self, node: Node) -> tuple[Strategy, ...]:
        """Return all strategies of a node that split its tensors evenly; the replicated one first."""
        space = self._spaces[node]
        options = [tuple(self._tables[size][node] if size > 1 else _whole(node)) for size in self._mesh.sizes]
        key = None if space is None else (tuple(space.sizes.items()), space.operands, space.results), tuple(options)
        if key not in self._found:
            self._found[key] = self._all(space, options)
        return self._found[key]

    def made(self, value: Node) -> set[tuple[int, Placement]]:
        """Return sizes of axes, with placements on them that rows of its maker give a value."""
        source, position = item_of(value) or (value, 0)
        sizes = {size: table[source] for size, table in self._tables.items() if size > 1}
        return {(size, option.row.results[position]) for size, options in sizes.items() for option in options}

    def needed(self, node: Node, value: Node) -> set[tuple[int, Placement]]:
        """Return sizes of axes, with placements on them that rows of a call need of one of its operands."""
        at = operands(node).index(value)
        sizes = {size: table[node] for size, table in self._tables.items() if size > 1}
        return {(size, option.row.operands[at]) for size, options in sizes.items() for option in options}

    def _all(self, space: Space | None, options: Sequence[tuple[_AxisRow, ...]]) -> tuple[Strategy, ...]:
        found: dict[tuple[Row, ...], None] = {}
        axes = tuple(chain(*self._axis_groups))
        for alike in product(*(_alike([options[axis] for axis in group]) for group in self._axis_groups)):
            at = dict(zip(axes, chain(*alike), strict=True))
            for rows in self._ordered(space, tuple(at[axis] for axis in range(len(options)))):
                found[rows] = None
        return tuple(dict.fromkeys(_strategy(rows) for rows in found))

    def _ordered(self, space: Space | None, picked: tuple[_AxisRow, ...]) -> Iterator[tuple[Row, ...]]:
        """Yield rows of `picked` with axis groups on one digit nested, in every order."""
        groups: dict[tuple[str, Digit], list[tuple[int, ...]]] = {}
        for group in self._axis_groups:
            if (option := picked[group[0]]).factor:
                groups.setdefault((option.factor, option.digit), []).append(group)
        if not groups or space is None:
            yield tuple(option.row for option in picked)
            return
        if any((space.rings.get(factor), digit) in groups for factor, digit in groups):
            return  # one axis shards queries alone that another shards with keys
        for orders in product(*(_orders(space, factor, among) for (factor, _), among in groups.items())):
            digits: dict[str, list[tuple[int, int]]] = {}
            halves: dict[str, set[tuple[int, int]]] = {}  # of mirrored digits
            rows: list[Row | None] = [option.row for option in picked]
            for (factor, (outer, mirror)), order in zip(groups, orders, strict=True):
                if mirror:
                    halves.setdefault(factor, set()).add((outer // (2 * mirror), outer // mirror))
                for axis in chain(*order):
                    size = self._mesh.sizes[axis]
                    digits.setdefault(factor, []).append((outer, outer * size))
                    rows[axis] = factor_row(space, factor, outer, size, mirror=mirror)
                    outer, mirror = outer * size, mirror * size
            if all(row is not None for row in rows) and all(
                _apart(space.sizes[f], [*at, *halves.get(f, ())]) for f, at in digits.items()
            ):
                yield tuple(row for row in rows if row is not None)


def _orders(space: Space, factor: str, axis_groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the orders in which axes may shard one digit; a ring goes around them in the order of the mesh."""
    for order in permutations(axis_groups):
        axes = tuple(chain(*order))
        if factor not in space.rings or axes == tuple(sorted(axes)):
            yield order


def _alike(options: Sequence[tuple[_AxisRow, ...]]) -> Iterator[tuple[_AxisRow, ...]]:
    """Yield, per row of the first axis of a group, the corresponding rows of all axes, if each has one."""
    for option in options[0]:
        others = [next((other for other in some if option.is_like(other)), None) for some in options[1:]]
        if None not in others:
            yield (option, *(other for other in others if other is not None))


def _apart(length: int, digits: list[tuple[int, int]]) -> bool:
    """Return whether digits (first, end) of a factor do not overlap."""
    end = 1
    for first, after in sorted(digits):
        if first % end:
            return False
        end = after
    return length % end == 0


def _strategy(rows: tuple[Row, ...]) -> Strategy:
    needs = tuple(Layout(placements) for placements in zip(*(row.operands for row in rows), strict=True))
    return Strategy(needs, tuple(Layout(placements) for placements in zip(*(row.results for row in rows), strict=True)))


def _space(node: Node) -> Space | None:
    if node.op == "placeholder" or is_reshard(node):
        shape = tuple(tensor_of(node).shape)
        dims: Dims = tuple((f"d{dim}",) if size > 1 else () for dim, size in enumerate(shape))
        sizes = {f"d{dim}": size for dim, size in enumerate(shape) if size > 1}
        return Space(sizes, (), (dims,))
    return space_of(node)


def _whole(node: Node) -> list[_AxisRow]:
    count = 0 if node.op == "placeholder" or is_reshard(node) else len(operands(node))
    return [_AxisRow(replicated_row(count, len(results_of(node))))]


class RowTables:
    """The rows of the nodes of `graph` on one axis, by its size. If `is_large`, rows that never pay are left out."""

    def __init__(self, graph: Graph, *, is_large: bool) -> None:
        self.nodes = tuple(n for n in graph.nodes if n.op != "output" and results_of(n))
        self.spaces = {node: _space(node) for node in self.nodes}
        self._is_large = is_large
        self.is_long = is_long(self.nodes)
        self._tables: dict[tuple[int, bool], Mapping[Node, Sequence[_AxisRow]]] = {}

    def table(self, size: int, *, by_position: bool) -> Mapping[Node, Sequence[_AxisRow]]:
        """Return the rows of each node on an axis; `by_position` adds those that shard the positions of attention."""
        key = size, by_position
        if key not in self._tables:
            made = _RowTable(self.nodes, self.spaces, size, is_large=self._is_large, by_position=by_position)
            self._tables[key] = made.table
        return self._tables[key]

    def splits(self, size: int) -> Mapping[Node, Sequence[_AxisRow]]:
        """Return a row for each factor of each node on an axis, beside the replicated one."""
        return {node: [*_whole(node), *_splits(space, size)] for node, space in self.spaces.items()}


def _splits(space: Space | None, size: int) -> Iterator[_AxisRow]:
    if space is None:
        return
    for factor in space.sizes:
        for digit in dict.fromkeys(((1, 0), _first_digit(space, factor, size))):
            row = factor_row(space, factor, digit[0], size, mirror=digit[1])
            if row is not None:
                yield _AxisRow(row, factor, digit)


def _first_digit(space: Space, factor: str, size: int) -> Digit:
    """Return the digit that a search starts from: mirrored for the positions of causal attention, if they divide."""
    if factor not in space.counted and space.rings.get(factor) not in space.counted:
        return 1, 0
    positions = causal_positions(space.sizes[factor], size)
    return positions.outer, positions.mirror


class _RowTable:
    """The rows on an axis of one size. `table` grows until no row implies another one at a neighbour."""

    def __init__(
        self,
        nodes: tuple[Node, ...],
        spaces: Mapping[Node, Space | None],
        size: int,
        *,
        is_large: bool,
        by_position: bool,
    ) -> None:
        self.nodes, self.spaces, self.size, self.by_position = nodes, spaces, size, by_position
        self.table: dict[Node, list[_AxisRow]] = {node: _whole(node) for node in nodes}
        self.added: set[tuple[Node, str, Digit]] = set()
        for node in nodes:
            for factor, digit in self._factors(node):
                self._add(node, factor, digit)
        for _ in range(SWEEPS):
            before = sum(map(len, self.table.values()))
            for node in nodes:
                self._from_operands(node)
            for node in reversed(nodes):
                self._to_operands(node)
            if sum(map(len, self.table.values())) == before:
                break
        if is_large:
            for node in reversed(nodes):
                self.table[node] = [option for option in self.table[node] if not self._never_pays(node, option.row)]

    def _factors(self, node: Node) -> Iterator[tuple[str, Digit]]:
        """Yield factors with the digit that a search starts from."""
        space = self.spaces[node]
        if space is not None and item_of(node) is None:
            yield from ((factor, _first_digit(space, factor, self.size)) for factor in space.sizes)

    def _add(self, node: Node, factor: str, digit: Digit) -> None:
        if (node, factor, digit) in self.added or (digit[1] and _is_stored(node)):
            return
        self.added.add((node, factor, digit))
        space = self.spaces[node]
        if space is None or not self._is_considered(space, factor, digit):
            return
        row = factor_row(space, factor, digit[0], self.size, mirror=digit[1])
        if row is not None:
            self._put(node, _AxisRow(row, factor, digit))

    def _is_considered(self, space: Space, factor: str, digit: Digit) -> bool:
        if factor not in space.counted and factor not in space.rings and factor not in space.reaches:
            return True
        return self.by_position and digit == _first_digit(space, factor, self.size)

    def _put(self, node: Node, option: _AxisRow) -> None:
        options = self.table[node]
        if len(options) < ROWS and all(option.row != other.row for other in options):
            options.append(option)

    def _placements(self, value: Node) -> list[Placement]:
        source, position = item_of(value) or (value, 0)
        return list(dict.fromkeys(option.row.results[position] for option in self.table[source]))

    def _from_operands(self, node: Node) -> None:
        space = self.spaces[node]
        if space is None or node.op == "placeholder" or is_reshard(node):
            return
        for i, value in enumerate(operands(node)):
            for placement in self._placements(value):
                if isinstance(placement, Shard) and (at := factor_at(space, space.operands[i], placement, self.size)):
                    self._add(node, at[0], (at[1], placement.mirror))
                elif isinstance(placement, Partial) and (row := row_sharding(space, i, placement, self.size)):
                    self._put(node, _AxisRow(row))

    def _to_operands(self, node: Node) -> None:
        if node.op == "placeholder" or is_reshard(node) or item_of(node) is not None:
            return
        for i, value in enumerate(operands(node)):
            source, position = item_of(value) or (value, 0)
            space = self.spaces.get(source)
            if space is None:
                continue
            for placement in dict.fromkeys(option.row.operands[i] for option in self.table[node]):
                if isinstance(placement, Shard) and (at := factor_at(space, space.results[position], placement, self.size)):
                    self._add(source, at[0], (at[1], placement.mirror))
                elif isinstance(placement, Partial) and (row := row_giving(space, position, placement, self.size)):
                    self._put(source, _AxisRow(row))

    def _never_pays(self, node: Node, row: Row) -> bool:
        """Return whether a row passes on partial values that are better reduced before."""
        if node.op != "call_function" or not any([isinstance(at, Partial) for at in row.operands]):
            return False
        values = operands(node)
        partial = [value for value, at in zip(values, row.operands, strict=False) if isinstance(at, Partial)]
        if any(_numel(value) > 1 and value not in partial for value in values):
            return True
        if any(self._takes(node, position, at) for position, at in enumerate(row.results)):
            return False
        return all(_numel(value) <= sum(map(_numel, value.users)) for value in partial) and len(partial) == 1

    def _takes(self, node: Node, position: int, placement: Placement) -> bool:
        """Return whether a user can use a result as it is placed; if it is returned or resharded on purpose, that is
        left open."""
        values = [user for user in node.users if item_of(user) == (node, position)] or [node]
        users = [(value, user) for value in values for user in value.users]
        if any(user.op == "output" or is_reshard(user) for _, user in users):
            return True
        return any(
            option.row.operands[i] == placement
            for value, user in users
            for i, operand in enumerate(operands(user))
            if operand is value
            for option in self.table.get(user, ())
        )


def _is_stored(node: Node) -> bool:
    """Return whether a value is kept between steps, in a layout that DTensor has."""
    return node.op == "placeholder" and input_of(node).role in (InputRole.PARAMETER, InputRole.BUFFER)


def _numel(node: Node) -> int:
    return sum(result.numel() for result in results_of(node)) if node.op != "output" else 0
