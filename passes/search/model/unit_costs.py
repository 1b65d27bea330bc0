"""Cost reshards in seconds and layouts in bytes, by the formulas that the simulator uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from passes.cost.collective_time import collective_seconds, link_of
from passes.errors import CompilerError
from passes.hardware.hardware import Hardware
from passes.ir.collectives import TAKE_PART, Kind
from passes.ir.layout import Layout, Placement, Shard, is_even, local_shape
from passes.ir.mesh import Mesh
from passes.ir.routes import plan_steps
from passes.search.model.factor_graph import Floats, Ints

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Leg:
    """A step of a reshard. `before` and `after` are elements of one rank's part over all."""

    kind: Kind
    axes: tuple[int, ...]
    before: float
    after: float


_Route = tuple[int, ...]  # numbers of legs
_Seconds = tuple[float, float, float]  # inside a node, across, and of local steps
_Listed = tuple[tuple[Placement, ...], Ints]  # the placements of layouts on an axis, and per layout which of them it has


@dataclass(frozen=True, eq=False)
class _Ways:
    """Routes from each source to each target: `numbers` of routes, and of those the legs; -1 after the last one."""

    legs: Ints  # per route
    impossible: NDArray[np.bool_]  # per route, whether there is none
    numbers: Ints


@dataclass(frozen=True, eq=False)
class _Alike:
    """Classes of reshards with the same steps on one axis, as `ids[source, target]`; `forms` numbers them for all
    values."""

    ids: Ints
    forms: Ints


@dataclass(frozen=True, eq=False)
class TransitionCosts:
    """The seconds of transitions from each source to each target, on links and of local steps, and which are
    `impossible`."""

    inside: Floats
    across: Floats
    local: Floats
    impossible: NDArray[np.bool_]


@dataclass(frozen=True)
class UnitCosts:
    """The cached costs of transitions, and local shapes, on one mesh and hardware."""

    mesh: Mesh
    hardware: Hardware
    _codes: dict[str, int] = field(default_factory=dict)  # of kinds of placement
    _forms: dict[bytes, int] = field(default_factory=dict)  # of what steps on an axis follow from
    _legs: dict[_Leg, int] = field(default_factory=dict)
    _routes: dict[object, _Route | None] = field(default_factory=dict)
    _ways: dict[object, _Ways] = field(default_factory=dict)
    _locals: dict[tuple[Shape, Layout], Shape] = field(default_factory=dict)
    _even: dict[tuple[Shape, Layout], bool] = field(default_factory=dict)
    _costs: dict[object, TransitionCosts] = field(default_factory=dict)
    _times: dict[tuple[float, int], list[_Seconds]] = field(default_factory=dict)  # of legs, by bytes of the whole and bucket

    def on(self, mesh: Mesh) -> UnitCosts:
        """Return the costs on other hardware, or other links, with the same axes: the steps of reshards do not
        change."""
        assert mesh.hardware is not None and mesh.sizes == self.mesh.sizes
        return replace(self, mesh=mesh, hardware=mesh.hardware, _costs={}, _times={})

    def local(self, shape: Shape, layout: Layout) -> Shape:
        """Return the shape of one rank's part."""
        key = shape, layout
        if key not in self._locals:
            self._locals[key] = local_shape(layout, shape, self.mesh)
        return self._locals[key]

    def part(self, shape: Shape, layout: Layout) -> float:
        """Return one rank's elements over all."""
        whole = math.prod(shape)
        return math.prod(self.local(shape, layout)) / whole if whole else 0.0

    def nbytes(self, shape: Shape, itemsize: int, layout: Layout) -> float:
        """Return the bytes of one rank's part."""
        return float(math.prod(self.local(shape, layout)) * itemsize)

    def transition_costs(
        self, shape: Shape, itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout], bucket: int = 0
    ) -> TransitionCosts:
        """Cost reshards from each source to each target as `lower_reshards` emits them, equal ones once.

        With `bucket` bytes, a smaller collective is part of one of that size, and so is its time.
        """
        ends = shape, tuple(sources), tuple(targets)
        key = itemsize, bucket, ends
        if key not in self._costs:
            if ends not in self._ways:
                self._ways[ends] = self._routed(shape, sources, targets)
            ways, times = self._ways[ends], np.array(self._taken(float(math.prod(shape) * itemsize), bucket))
            seconds = np.zeros((len(ways.legs), 3))
            for leg in ways.legs.T:
                seconds += times[leg]
            inside, across, local = (column[ways.numbers] for column in seconds.T)
            self._costs[key] = TransitionCosts(inside, across, local, ways.impossible[ways.numbers])
        return self._costs[key]

    # --- ways

    def _routed(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> _Ways:
        """Find routes by `plan_steps`: on even layouts, once for all reshards that are alike."""
        odd = [np.array([0 if self._is_even(shape, one) else i for i, one in enumerate(side, 1)]) for side in (sources, targets)]
        wanted = [_listed([target.placements[axis] for target in targets]) for axis in range(self.mesh.ndim)]
        alike = [self._alike(axis, sources, wanted) for axis in range(self.mesh.ndim)]
        ids = [odd[0][:, None], odd[1][None, :], *(one.ids for one in alike)]
        _, first, back = np.unique(_numbers(ids), return_index=True, return_inverse=True)
        i, j = np.unravel_index(first, (len(sources), len(targets)))
        is_odd = (odd[0][i] > 0) | (odd[1][j] > 0)
        keys = zip(*(one.forms[one.ids[i, j]].tolist() for one in alike), strict=True)
        routes = []
        for one, two, like_no_other, key in zip(i.tolist(), j.tolist(), is_odd.tolist(), keys, strict=True):
            ends = sources[one], targets[two], shape
            at: object = ends if like_no_other else key
            if at not in self._routes:
                self._routes[at] = self._planned(*ends)
            routes.append(self._routes[at])
        legs = np.full((len(routes), max((len(route) for route in routes if route), default=0)), -1)
        for number, route in enumerate(routes):
            legs[number, : len(route or ())] = route or ()
        impossible = np.array([route is None for route in routes])
        return _Ways(legs, impossible, back.reshape(len(sources), len(targets)))

    def _is_even(self, shape: Shape, layout: Layout) -> bool:
        key = shape, layout
        if key not in self._even:
            self._even[key] = is_even(layout, shape, self.mesh)
        return self._even[key]

    def _alike(self, axis: int, sources: Sequence[Layout], wanted: Sequence[_Listed]) -> _Alike:
        """Number the reshards on an axis, per source and target: by its placements, and whether its digit fits beside
        each of the target's."""
        (have, position), size = _listed([source.placements[axis] for source in sources]), self.mesh.sizes[axis]
        listed, at = wanted[axis]
        codes, wishes = (np.array([self._codes.setdefault(_code(p), len(self._codes)) for p in s]) for s in (have, listed))
        fields = [codes[:, None], wishes[at][None, :], np.array([[p == q for q in listed] for p in have])[:, at]]
        for (others, at), width in zip(wanted, self.mesh.sizes, strict=True):
            fields.append(np.array([[_are_apart(p, size, q, width) for q in others] for p in have])[:, at])
        _, first, ids = np.unique(_numbers(fields), return_index=True, return_inverse=True)
        rows = np.stack([np.broadcast_to(one, fields[-1].shape).ravel()[first] for one in fields], axis=1)
        forms = [self._forms.setdefault(row.tobytes(), len(self._forms)) for row in rows.astype(np.int32)]
        return _Alike(ids.reshape(fields[-1].shape)[position], np.array(forms))

    def _planned(self, source: Layout, target: Layout, shape: Shape) -> _Route | None:
        try:
            steps = plan_steps(source, target, shape, self.mesh)
        except CompilerError:
            return None
        parts = [self.part(shape, layout) for layout in (source, *(step.layout for step in steps))]
        legs = zip(steps, parts, parts[1:], strict=False)
        found = (_Leg(step.kind, step.axes, before, after) for step, before, after in legs)
        return tuple(self._legs.setdefault(leg, len(self._legs)) for leg in found)

    def _taken(self, nbytes: float, bucket: int) -> list[_Seconds]:
        """Return the seconds of every leg for a tensor of so many bytes, and a last entry of 0."""
        times = self._times.setdefault((nbytes, bucket), [])
        times += [self._leg(leg, nbytes, bucket) for leg in list(self._legs)[len(times) :]]
        return [*times, (0.0, 0.0, 0.0)]

    def _leg(self, leg: _Leg, whole: float, bucket: int) -> _Seconds:
        """Return seconds inside a node, across, and of local steps."""
        if leg.kind is TAKE_PART:
            return 0.0, 0.0, 0.0  # a view
        if not leg.kind.communicates:
            return 0.0, 0.0, 2 * whole * leg.after / self.hardware.memory_bandwidth
        group = self.mesh.group_shape(tuple(self.mesh.names[axis] for axis in leg.axes))
        nbytes = whole * max(leg.before, leg.after)
        message = max(nbytes, bucket)
        seconds = collective_seconds(leg.kind.name, message, group, self.hardware)
        taken = seconds * nbytes / message if message else 0.0
        return (taken, 0.0, 0.0) if link_of(group) == "inside" else (0.0, taken, 0.0)


def _code(placement: Placement) -> str:
    return "S" if isinstance(placement, Shard) else str(placement)


def _are_apart(one: Placement, size: int, other: Placement, width: int) -> bool:
    """Return whether digits, over `size` and `width` ranks, do not overlap."""
    if not (isinstance(one, Shard) and isinstance(other, Shard)) or one.dim != other.dim:
        return True
    return other.outer % (one.outer * size) == 0 or one.outer % (other.outer * width) == 0


def _listed(placements: Sequence[Placement]) -> _Listed:
    numbers = {one: number for number, one in enumerate(dict.fromkeys(placements))}
    return tuple(numbers), np.array([numbers[one] for one in placements])


def _numbers(fields: Sequence[NDArray[np.integer | np.bool_]]) -> Ints:
    """Number each place of all fields together, as a flat array: the same where all fields are the same."""
    shape = np.broadcast_shapes(*(one.shape for one in fields))
    found, span = np.zeros(shape, dtype=np.int64), 1
    for one in fields:
        base = int(one.max(initial=0)) + 1
        if span >= (1 << 62) // base:
            found = np.unique(found, return_inverse=True)[1].reshape(shape)
            span = found.size
        if base > 1:
            found *= base
            found += one
            span *= base
    return found.ravel()
