"""Seconds of what a choice computes and of what a reshard moves, by the formulas that the simulator uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.cost.collective import collective_seconds, link_of
from passes.errors import CompilerError
from passes.ir.collective import COMMUNICATING, take_part
from passes.ir.hardware import Hardware
from passes.ir.layout import Layout, Placement, Shard, is_even, local_shape
from passes.ir.mesh import Mesh
from passes.ir.steps import Kind, plan_steps
from passes.search.problem import Floats, Ints, Move

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Leg:
    """A step of a reshard. `before` and `after` are elements of one rank's part over all."""

    kind: Kind
    axes: tuple[int, ...]
    before: float
    after: float


_Route = tuple[_Leg, ...]


@dataclass(frozen=True)
class _Likeness:
    """What the steps of a move follow from: what each axis has and wants, and which digits can stand side by side."""

    axes: tuple[tuple[str, str, bool], ...]
    beside: tuple[bool, ...]  # per two axes, whether what the first has goes with what the second wants


@dataclass(frozen=True, eq=False)
class Fares:
    """What moves from each source to each target take, in seconds; `never` where there is no way."""

    inside: Floats
    across: Floats
    local: Floats
    never: NDArray[np.bool_]


@dataclass(frozen=True)
class Prices:
    """Prices on one mesh of one hardware."""

    mesh: Mesh
    hardware: Hardware
    _fares: dict[object, Fares] = field(default_factory=dict)
    _routes: dict[object, _Route | None] = field(default_factory=dict)
    _moves: dict[tuple[_Route, float, int], Move] = field(default_factory=dict)
    _locals: dict[tuple[Shape, Layout], Shape] = field(default_factory=dict)
    _even: dict[tuple[Shape, Layout], bool] = field(default_factory=dict)

    def local(self, shape: Shape, layout: Layout) -> Shape:
        """Shape of one rank's part."""
        key = shape, layout
        if key not in self._locals:
            self._locals[key] = local_shape(layout, shape, self.mesh)
        return self._locals[key]

    def part(self, shape: Shape, layout: Layout) -> float:
        """One rank's elements over all."""
        whole = math.prod(shape)
        return math.prod(self.local(shape, layout)) / whole if whole else 0.0

    def nbytes(self, shape: Shape, itemsize: int, layout: Layout) -> float:
        """Bytes of one rank's part."""
        return float(math.prod(self.local(shape, layout)) * itemsize)

    def move(self, shape: Shape, itemsize: int, source: Layout, target: Layout, bucket: int = 0) -> Move | None:
        """A reshard as `lower_reshards` emits it; None where there is no way.

        With `bucket` bytes, a smaller collective is part of one of that size, and so is its time.
        """
        if source == target:
            return Move()
        route = self._route(source, target, shape)
        return None if route is None else self._taken(route, float(math.prod(shape) * itemsize), bucket)

    def fares(
        self, shape: Shape, itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout], bucket: int = 0
    ) -> Fares:
        """`move` from each source to each target. Moves that are alike are priced once."""
        key = shape, itemsize, bucket, tuple(sources), tuple(targets)
        if key not in self._fares:
            alike = self._alike(shape, sources, targets)
            _, first, back = np.unique(alike, return_index=True, return_inverse=True)
            seconds = np.zeros((len(first), 4))
            for number, at in enumerate(first.tolist()):
                source, target = divmod(at, len(targets))
                move = self.move(shape, itemsize, sources[source], targets[target], bucket)
                seconds[number] = (0.0, 0.0, 0.0, 1.0) if move is None else (move.inside, move.across, move.local, 0.0)
            found = seconds[back.reshape(alike.shape)]
            self._fares[key] = Fares(found[..., 0], found[..., 1], found[..., 2], found[..., 3] > 0)
        return self._fares[key]

    # --- ways

    def _route(self, source: Layout, target: Layout, shape: Shape) -> _Route | None:
        """As `plan_steps`: on even layouts, that of the first move that is like it."""
        if self._is_even(shape, source) and self._is_even(shape, target):
            key: object = self._likeness(source, target)
        else:
            key = source, target, shape
        if key not in self._routes:
            self._routes[key] = self._planned(source, target, shape)
        return self._routes[key]

    def _is_even(self, shape: Shape, layout: Layout) -> bool:
        key = shape, layout
        if key not in self._even:
            self._even[key] = is_even(layout, shape, self.mesh)
        return self._even[key]

    def _likeness(self, source: Layout, target: Layout) -> _Likeness:
        sizes, have, want = self.mesh.sizes, source.placements, target.placements
        axes = tuple((_code(a), _code(b), a == b) for a, b in zip(have, want, strict=True))
        beside = tuple(
            _are_apart(a, m, b, n) for a, m in zip(have, sizes, strict=True) for b, n in zip(want, sizes, strict=True)
        )
        return _Likeness(axes, beside)

    def _planned(self, source: Layout, target: Layout, shape: Shape) -> _Route | None:
        try:
            steps = plan_steps(source, target, shape, self.mesh)
        except CompilerError:
            return None
        parts = [self.part(shape, layout) for layout in (source, *(step.layout for step in steps))]
        legs = zip(steps, parts, parts[1:], strict=False)
        return tuple(_Leg(step.kind, step.axes, before, after) for step, before, after in legs)

    def _taken(self, route: _Route, nbytes: float, bucket: int) -> Move:
        key = route, nbytes, bucket
        if key not in self._moves:
            seconds = {"inside": 0.0, "across": 0.0, "local": 0.0}
            for leg in route:
                where, time = self._leg(leg, nbytes, bucket)
                seconds[where] += time
            self._moves[key] = Move(**seconds)
        return self._moves[key]

    def _leg(self, leg: _Leg, whole: float, bucket: int) -> tuple[str, float]:
        if leg.kind is take_part:
            return "local", 0.0  # a view
        if leg.kind not in COMMUNICATING:
            return "local", 2 * whole * leg.after / self.hardware.memory_bandwidth
        group = self.mesh.group_shape(tuple(self.mesh.names[axis] for axis in leg.axes))
        nbytes = whole * max(leg.before, leg.after)
        message = max(nbytes, bucket)
        seconds = collective_seconds(leg.kind.__name__, message, group, self.hardware)
        return link_of(group), seconds * nbytes / message if message else 0.0

    def _alike(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> Ints:
        """Per source and target a number, equal for moves that are alike."""
        ids: dict[Placement, int] = {}
        have, want = (
            np.array([[ids.setdefault(p, len(ids)) for p in layout.placements] for layout in side])
            for side in (sources, targets)
        )
        listed = list(ids)
        codes = np.unique([_code(p) for p in listed], return_inverse=True)[1]
        found = np.zeros((len(sources), len(targets)), dtype=np.int64)
        for axis in range(self.mesh.ndim):
            a, b = have[:, None, axis], want[None, :, axis]
            found = _joined(found, codes[a], codes[b], a == b)
            for other in range(self.mesh.ndim):
                sizes = self.mesh.sizes[axis], self.mesh.sizes[other]
                table = np.array([[_are_apart(p, sizes[0], q, sizes[1]) for q in listed] for p in listed])
                found = _joined(found, table[have[:, None, axis], want[None, :, other]])
        odd = (np.array([not self._is_even(shape, layout) for layout in side]) for side in (sources, targets))
        rows, columns = (np.where(uneven, np.arange(1, len(uneven) + 1), 0) for uneven in odd)
        unlike = np.where(rows[:, None] + columns[None, :] > 0, np.arange(1, found.size + 1).reshape(found.shape), 0)
        return _joined(found, unlike)


def _code(placement: Placement) -> str:
    return "S" if isinstance(placement, Shard) else str(placement)


def _are_apart(one: Placement, size: int, other: Placement, width: int) -> bool:
    """Whether digits, over `size` and `width` ranks, do not cut through each other."""
    if not (isinstance(one, Shard) and isinstance(other, Shard)) or one.dim != other.dim:
        return True
    return other.outer % (one.outer * size) == 0 or one.outer % (other.outer * width) == 0


def _joined(numbers: Ints, *more: NDArray[np.generic]) -> Ints:
    """Numbers that are equal where `numbers` and all of `more` are."""
    for one in more:
        codes = one.astype(np.int64)
        base = int(codes.max(initial=0)) + 1
        if int(numbers.max(initial=0)) >= (1 << 62) // base:
            numbers = np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)
        numbers = numbers * base + codes
    return numbers
