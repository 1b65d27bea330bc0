"""Runs the rows of a rule on split inputs, and compares with the op on whole inputs.

The law that every rule obeys: split the operands as a row says, run the call on each rank (in its
local form, where the rule has one), put the results together as the row says, and get the op's value.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from passes.ir.call import Call, Tensor
from passes.ir.collectives import kind_of_op
from passes.ir.graph import set_value, value_of
from passes.ir.layout import (
    PARTIAL_OPS,
    Layout,
    Partial,
    R,
    Shard,
    assemble,
    is_even,
    is_storable,
    local_part,
    local_shape,
)
from passes.ir.mesh import Mesh
from passes.ir.padding import PADS
from passes.rules.rule import LocalCall, Message, Row, Rule, Space, factor_row, registered, rows, rule_of

SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    """A call on real tensors, and the rows it must have (without the replicated one), as text.

    `rows` holds those with a contiguous digit, over all axis sizes in SIZES, with `;` between them, and
    `P(*)` for every reduction.
    `values` is False where the result is undefined (`empty`), and only its shape counts.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rows: str = ""
    values: bool = True
    note: str = ""

    def __str__(self) -> str:
        return f"{self.op}{'-' + self.note if self.note else ''}"


def check(case: Case) -> tuple[str, ...]:
    """Execute every row of the case's rule; the texts of its rows. Raises AssertionError where one is wrong."""
    rule = rule_of(case.op)
    assert rule is not None, f"{case.op} has no rule"
    whole = _results(case.op(*_map(case.args, _copy), **_map(case.kwargs, _copy)))
    call = call_on(case, whole)
    space = rule.space(call)
    if space is None:
        return ()
    assert len(space.operands) == len(call.operands)
    assert [len(dims) for dims in space.operands] == [t.ndim for t in call.operands], case
    assert [len(dims) for dims in space.results] == [t.ndim for t in call.results], case
    seen: list[str] = []
    for size in SIZES:
        for row in all_rows(space, size):
            _check_rows(case, rule, call, whole, Mesh.of(x=size), (row,))
        seen += [str(row) for row in rows(space, size)[1:] if str(row) not in seen]
    for pair in _pairs(space):
        _check_rows(case, rule, call, whole, Mesh.of(x=2, y=2), pair)
    return tuple(seen)


def call_on(case: Case, whole: Sequence[torch.Tensor]) -> Call:
    """Return the abstract call of a case."""
    results = tuple(Tensor(tuple(t.shape), t.dtype) for t in whole)
    return Call(case.op, _abstract(case.args), _abstract(case.kwargs), results)


def all_rows(space: Space, size: int) -> Iterator[Row]:
    """Return all rows on an axis of `size`: contiguous digits, digits with 2 or 3 outside, and mirrored ones."""
    yield from rows(space, size)
    whole = [factor for factor in space.sizes if factor not in space.rings]  # a ring sends: tests/spmd/test_context.py
    for factor, (outer, mirror) in itertools.product(whole, ((2, 0), (3, 0), (2, 1), (4, 1), (4, 2))):
        row = factor_row(space, factor, outer, size, mirror=mirror)
        if row is not None:
            yield row


def _pairs(space: Space) -> Iterator[tuple[Row, Row]]:
    """Return rows on two axes of size 2 at once, the same factor twice included (one axis inside the other)."""
    single = rows(space, 2)[1:]
    for first, second in itertools.product(single, single):
        if second.label == first.label and first.label in space.sizes:
            inner = factor_row(space, first.label, 2, 2)
            if inner is not None:
                yield first, inner
                yield inner, first
        elif _one_reduction(first, second):
            yield first, second


def _one_reduction(first: Row, second: Row) -> bool:
    """Return whether all partial placements of two rows are by one op: reductions of two kinds do not commute."""
    ops = {p.op for row in (first, second) for p in (*row.operands, *row.results) if isinstance(p, Partial)}
    return len(ops) <= 1


def _check_rows(
    case: Case, rule: Rule, call: Call, whole: Sequence[torch.Tensor], mesh: Mesh, chosen: tuple[Row, ...]
) -> None:
    layouts = [Layout(tuple(row.operands[i] for row in chosen)) for i in range(len(call.operands))]
    outs = [Layout(tuple(row.results[i] for row in chosen)) for i in range(len(whole))]
    shapes = [*(t.shape for t in call.operands), *(t.shape for t in call.results)]
    is_legal = is_storable if call.op in PADS else is_even  # parts of parameters may be padded
    if not all(is_legal(layout, shape, mesh) for layout, shape in zip([*layouts, *outs], shapes, strict=True)):
        assert mesh.ndim > 1, f"{case}: a row that does not divide: {chosen[0]}"
        return
    tensors = list(_tensors((case.args, case.kwargs)))
    try:
        splits = [split(tensor, layout, mesh) for tensor, layout in zip(tensors, layouts, strict=True)]
    except NotSplittable:
        return
    meeting = Meeting(mesh)

    def run(place: int, coordinate: tuple[int, ...]) -> list[torch.Tensor]:
        here = EagerCall(case, call, [parts[place] for parts in splits], layouts, outs, mesh, coordinate, meeting)
        node = rule.local(here) if rule.local else None
        node = node if node is not None else here.emit(case.op, *here.args, **here.kwargs)
        return _results(value_of(node) if isinstance(node, Node) else tuple(map(value_of, node)))

    parts = meeting.of_all_ranks(run)
    where = f"{case} on {mesh}: {' | '.join(map(str, chosen))}"
    for i, expected in enumerate(whole):
        local = [part[i] for part in parts]
        _check_shapes(local, expected, outs[i], mesh, where)
        if case.values:
            _check_values(local, expected, outs[i], mesh, where, coarse=_is_coarse([*tensors, *whole]))


def _check_shapes(parts: list[torch.Tensor], expected: torch.Tensor, layout: Layout, mesh: Mesh, where: str) -> None:
    shape = local_shape(layout, expected.shape, mesh)
    for part in parts:
        assert part.shape == shape, f"{where}: local shape {tuple(part.shape)}, not {shape}"
        assert part.dtype == expected.dtype, f"{where}: local dtype {part.dtype}, not {expected.dtype}"


def _check_values(
    parts: list[torch.Tensor], expected: torch.Tensor, layout: Layout, mesh: Mesh, where: str, *, coarse: bool
) -> None:
    for axis, placement in enumerate(layout.placements):
        groups = mesh.groups((mesh.names[axis],)) if placement == R else ()
        for group in groups:
            for place in group[1:]:
                _close(parts[place], parts[group[0]], f"{where}: replicated values differ", coarse=coarse)
    _close(assemble(parts, expected.shape, layout, mesh), expected, where, coarse=coarse)


def _close(actual: torch.Tensor, expected: torch.Tensor, where: str, *, coarse: bool) -> None:
    exact = not (expected.dtype.is_floating_point or expected.dtype.is_complex)
    tolerance = 0.0 if exact else 1e-5 if coarse else 1e-12
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{where}\n{text}"
    )


def _is_coarse(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether some of the numbers are less than double: random terms of them do not sum up exactly."""
    return any(t.dtype in (torch.float32, torch.complex64, torch.bfloat16) for t in tensors)


class NotSplittable(Exception):
    """A value that has no terms: an average of integers, a product of anything but floats, a boolean."""


def split(tensor: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Return every rank's part; a partial value is split into different random terms on every rank."""
    grid: dict[tuple[int, ...], torch.Tensor] = {(): tensor}
    # Terms first, the last axis outermost, as `assemble` reduces the first axis first.
    for axis in reversed(range(mesh.ndim)):
        placement = layout.on(axis)
        terms: dict[tuple[int, ...], torch.Tensor] = {}
        for coordinate, held in grid.items():
            split_up = [held] * mesh.sizes[axis]
            if isinstance(placement, Partial):
                split_up = _terms(held, placement.op, mesh.sizes[axis])
            terms |= {(i, *coordinate): term for i, term in enumerate(split_up)}
        grid = terms
    shards = Layout(tuple(p if isinstance(p, Shard) else R for p in layout.placements))
    return [local_part(grid[coordinate], shards, mesh, coordinate) for coordinate in mesh.coordinates()]


def _terms(tensor: torch.Tensor, op: str, count: int) -> list[torch.Tensor]:
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if tensor.dtype is torch.bool or (op in ("avg", "product") and not floats):
        raise NotSplittable
    noise = [_noise(tensor) for _ in range(count)]
    if op in ("sum", "avg"):
        first = noise[1:]
        last = tensor - sum(first, torch.zeros_like(tensor))
        scale = count if op == "avg" else 1
        return [term * scale for term in (*first, last)]
    if op == "product":
        first = [term.abs() + 0.5 for term in noise[1:]]
        divisor = torch.stack(first).prod(0)
        return [*first, tensor / divisor]
    sign = 1 if op == "max" else -1
    owner = torch.randint(count, tensor.shape)
    return [torch.where(owner == i, tensor, tensor - sign * term.abs()) for i, term in enumerate(noise)]


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.randint(-5, 6, tensor.shape, dtype=tensor.dtype)


class Meeting:
    """Ranks of a mesh, a thread each, and the collectives in which they meet."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._barrier = mesh, threading.Barrier(mesh.size)
        self._given: list[tuple[Any, ...]] = [()] * mesh.size

    def of_all_ranks(self, run: Callable[[int, tuple[int, ...]], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Run a function of place and coordinate on every rank."""

        def guarded(place: int, coordinate: tuple[int, ...]) -> list[torch.Tensor]:
            try:
                return run(place, coordinate)
            except BaseException:
                self._barrier.abort()  # no rank waits for this one
                raise

        with ThreadPoolExecutor(self.mesh.size) as ranks:
            return list(ranks.map(guarded, range(self.mesh.size), self.mesh.coordinates()))

    def send(self, coordinate: tuple[int, ...], op: OpOverload, args: tuple[Any, ...], axes: tuple[int, ...]) -> Any:
        """Return what a rank gets from a collective that all of them make."""
        place = list(self.mesh.coordinates()).index(coordinate)
        self._given[place] = args
        self._barrier.wait()
        names = tuple(self.mesh.names[axis] for axis in axes)
        group = next(group for group in self.mesh.groups(names) if place in group)
        kind = kind_of_op(op)
        assert kind is not None
        got = kind.ops[op]([self._given[other] for other in group])[list(group).index(place)].clone()
        self._barrier.wait()
        return got


class EagerCall(LocalCall):
    """A call on one rank's real tensors: what is emitted is executed at once."""

    def __init__(
        self,
        case: Case,
        call: Call,
        parts: list[torch.Tensor],
        layouts: list[Layout],
        outs: list[Layout],
        mesh: Mesh,
        coordinate: tuple[int, ...],
        meeting: Meeting | None = None,
    ) -> None:
        self._graph = Graph()
        self._layouts, self._outs, self._coordinate, self._meeting = layouts, outs, coordinate, meeting
        self.call = call
        self.mesh = mesh
        self.operands = tuple(self._constant(part) for part in parts)
        nodes = iter(self.operands)
        self.args = tuple(_map(case.args, lambda _: next(nodes)))
        self.kwargs = _map(case.kwargs, lambda _: next(nodes))

    def emit(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self._graph.call_function(op, args, kwargs)
        value = op(*_map_nodes(args), **_map_nodes(kwargs))
        set_value(node, tuple(value) if isinstance(value, list) else value)
        return node

    def emit_copy(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.emit(op, *args, **kwargs)

    def send(self, op: OpOverload, *args: Any, axes: tuple[int, ...], message: Message) -> Node:
        assert self._meeting is not None, "a single rank sends to no other"
        names = tuple(self.mesh.names[axis] for axis in axes)
        values = (*_map_nodes(args), self.mesh.group_name(names))
        return self._constant(self._meeting.send(self._coordinate, op, values, axes))

    def item(self, results: Node, number: int) -> Node:
        return self.emit(operator.getitem, results, number)

    def local_shape(self, result: int = 0) -> tuple[int, ...]:
        return local_shape(self._outs[result], self.call.results[result].shape, self.mesh)

    def operand_layout(self, operand: int) -> Layout:
        return self._layouts[operand]

    def result_layout(self, result: int = 0) -> Layout:
        return self._outs[result]

    def positions(self, layout: Layout, dim: int, size: int) -> Node:
        here = tuple(replace(p, dim=0) if isinstance(p, Shard) and p.dim == dim else R for p in layout.placements)
        return self._constant(local_part(torch.arange(size), Layout(here), self.mesh, self._coordinate))

    def coordinate(self, axis: int) -> Node:
        return self._constant(torch.tensor([self._coordinate[axis]]))

    def seed(self) -> Node:
        return self._constant(torch.tensor(17))

    def number(self) -> int:
        return 3

    def _constant(self, value: torch.Tensor) -> Node:
        node = self._graph.placeholder(f"value{len(self._graph.nodes)}")
        set_value(node, value)
        return node


def _map_nodes(value: Any) -> Any:
    if isinstance(value, Node):
        return value_of(value)
    if isinstance(value, tuple | list):
        return type(value)(_map_nodes(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _map_nodes(item) for key, item in value.items()}
    return value


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with `change` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(value, found.append)
    return iter(found)


def _abstract(value: Any) -> Any:
    """Return a value as `passes.ir.call.call_of` has it: lists are tuples."""
    if isinstance(value, torch.Tensor):
        return Tensor(tuple(value.shape), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(_abstract(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _abstract(item) for key, item in value.items()}
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def _results(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [item for item in value if isinstance(item, torch.Tensor)]


def check_case(case: Case) -> None:
    """Execute every row, and compare their texts with those that the case expects."""
    actual, expected = {row.strip() for row in check(case)}, set(_expected(case.rows))
    missing, extra = expected - actual, actual - expected
    assert not missing and not extra, f"{case}: missing {sorted(missing)}, not expected {sorted(extra)}"


def _expected(text: str) -> Iterator[str]:
    """Return the rows of a case, with `;` between them; `P(*)` stands for every reduction."""
    for line in filter(None, map(str.strip, text.split(";"))):
        if "P(*)" in line:
            yield from (line.replace("P(*)", f"P({op})") for op in PARTIAL_OPS)
        else:
            yield line


def ops_of(module: str) -> set[OpOverload]:
    """Return the ops whose rule is written in `module`."""
    return {op for op in registered() if rule_of(op).space.__module__ == module}


def floats(*shape: int) -> torch.Tensor:
    """Return numbers without ties, different at every call, equal in every run."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=_GENERATOR)
    return ((order + torch.rand(count, generator=_GENERATOR, dtype=torch.float64)) / 4 - count / 8).reshape(shape)


_GENERATOR = torch.Generator().manual_seed(0)
