"""Seconds of what a choice computes and of what a reshard moves, by the formulas that the simulator uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, eq=False)
class _Ways:
    """How to get from each source to each target: numbers of routes, of which one may be none."""

    routes: tuple[_Route | None, ...]
    numbers: Ints


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
    _codes: dict[str, int] = field(default_factory=dict)  # of kinds of placement
    _routes: dict[object, _Route | None] = field(default_factory=dict)
    _ways: dict[object, _Ways] = field(default_factory=dict)
    _locals: dict[tuple[Shape, Layout], Shape] = field(default_factory=dict)
    _even: dict[tuple[Shape, Layout], bool] = field(default_factory=dict)
    _fares: dict[object, Fares] = field(default_factory=dict)
    _moves: dict[tuple[int, float, int], Move] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> Prices:
        """Those of other hardware, or of other links, on the same axes: what moves go by stays as it is."""
        assert mesh.hardware is not None and mesh.sizes == self.mesh.sizes
        return replace(self, mesh=mesh, hardware=mesh.hardware, _fares={}, _moves={})

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

    def fares(
        self, shape: Shape, itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout], bucket: int = 0
    ) -> Fares:
        """Reshards from each source to each target as `lower_reshards` emits them. Moves that are alike are priced once.

        With `bucket` bytes, a smaller collective is part of one of that size, and so is its time.
        """
        ends = shape, tuple(sources), tuple(targets)
        key = itemsize, bucket, ends
        if key not in self._fares:
            if ends not in self._ways:
                self._ways[ends] = self._found(shape, sources, targets)
            ways, nbytes = self._ways[ends], float(math.prod(shape) * itemsize)
            seconds = np.zeros((len(ways.routes), 4))
            for number, route in enumerate(ways.routes):
                move = None if route is None else self._taken(route, nbytes, bucket)
                seconds[number] = (0.0, 0.0, 0.0, 1.0) if move is None else (move.inside, move.across, move.local, 0.0)
            found = seconds[ways.numbers]
            self._fares[key] = Fares(found[..., 0], found[..., 1], found[..., 2], found[..., 3] > 0)
        return self._fares[key]

    # --- ways

    def _found(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> _Ways:
        """By the steps of `plan_steps`: on even layouts, by those of the first move that is like it."""
        likeness = self._likeness(shape, sources, targets)
        rows = likeness.reshape(-1, likeness.shape[2])
        _, first, back = np.unique(_numbers(rows), return_index=True, return_inverse=True)
        routes = []
        for at in first.tolist():
            source, target = sources[at // len(targets)], targets[at % len(targets)]
            key: object = (source, target, shape) if rows[at][0] or rows[at][1] else rows[at].tobytes()
            if key not in self._routes:
                self._routes[key] = self._planned(source, target, shape)
            routes.append(self._routes[key])
        return _Ways(tuple(routes), back.reshape(likeness.shape[:2]))

    def _is_even(self, shape: Shape, layout: Layout) -> bool:
        key = shape, layout
        if key not in self._even:
            self._even[key] = is_even(layout, shape, self.mesh)
        return self._even[key]

    def _likeness(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> NDArray[np.int32]:
        """Per source and target what the steps follow from: what each axis has and wants, and which digits can stand
        side by side. First whether source and target are not even: these are like no other."""
        ids: dict[Placement, int] = {}
        have, want = (
            np.array([[ids.setdefault(p, len(ids)) for p in layout.placements] for layout in side])
            for side in (sources, targets)
        )
        listed, axes = list(ids), range(self.mesh.ndim)
        codes = np.array([self._codes.setdefault(_code(p), len(self._codes)) for p in listed])
        apart = {
            (m, n): np.array([[_are_apart(p, m, q, n) for q in listed] for p in listed])
            for m in self.mesh.sizes
            for n in self.mesh.sizes
        }
        odd = [[0 if self._is_even(shape, one) else i for i, one in enumerate(side, 1)] for side in (sources, targets)]
        fields = [np.array(odd[0])[:, None], np.array(odd[1])[None, :]]
        for i in axes:
            a = have[:, None, i]
            fields += [codes[a], codes[want[None, :, i]], a == want[None, :, i]]
            fields += [apart[self.mesh.sizes[i], self.mesh.sizes[j]][a, want[None, :, j]] for j in axes]
        found = np.empty((len(sources), len(targets), len(fields)), dtype=np.int32)
        for number, one in enumerate(fields):
            found[..., number] = one
        return found

    def _planned(self, source: Layout, target: Layout, shape: Shape) -> _Route | None:
        try:
            steps = plan_steps(source, target, shape, self.mesh)
        except CompilerError:
            return None
        parts = [self.part(shape, layout) for layout in (source, *(step.layout for step in steps))]
        legs = zip(steps, parts, parts[1:], strict=False)
        return tuple(_Leg(step.kind, step.axes, before, after) for step, before, after in legs)

    def _taken(self, route: _Route, nbytes: float, bucket: int) -> Move:
        key = id(route), nbytes, bucket  # `_routes` keeps it
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


def _code(placement: Placement) -> str:
    return "S" if isinstance(placement, Shard) else str(placement)


def _are_apart(one: Placement, size: int, other: Placement, width: int) -> bool:
    """Whether digits, over `size` and `width` ranks, do not cut through each other."""
    if not (isinstance(one, Shard) and isinstance(other, Shard)) or one.dim != other.dim:
        return True
    return other.outer % (one.outer * size) == 0 or one.outer % (other.outer * width) == 0


def _numbers(rows: NDArray[np.int32]) -> Ints:
    """Per row a number, the same for equal rows."""
    found = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        base = int(column.max(initial=0)) + 1
        if int(found.max(initial=0)) >= (1 << 62) // base:
            found = np.unique(found, return_inverse=True)[1]
        found = found * base + column
    return found
