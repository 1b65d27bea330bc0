"""Find the steps of reshards from each of many layouts to each of others, once for all that are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from passes.errors import CompilerError
from passes.ir.collectives import Kind
from passes.ir.layout import Layout, Placement, Shard, is_even
from passes.ir.routes import plan_steps
from passes.search.model.factor_graph import Ints
from passes.search.model.local_sizes import LocalSizes, Shape


@dataclass(frozen=True)
class Leg:
    """A step of a reshard. `before` and `after` are elements of one rank's part over all."""

    kind: Kind
    axes: tuple[int, ...]
    before: float
    after: float


_Route = tuple[int, ...]  # numbers of legs
_Listed = tuple[tuple[Placement, ...], Ints]  # the placements of layouts on an axis, and per layout which of them it has


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes from each source to each target: `numbers` of routes, and of those the numbers of legs; -1 after the last."""

    legs: Ints  # per route
    impossible: NDArray[np.bool_]  # per route, whether there is none
    numbers: Ints


@dataclass(frozen=True, eq=False)
class _Alike:
    """Classes of reshards with the same steps on one axis, as `ids[source, target]`; `forms` numbers them for all
    values."""

    ids: Ints
    forms: Ints


@dataclass(frozen=True)
class ReshardRoutes:
    """The routes of reshards on a mesh as `lower_reshards` takes them, whatever its links are like."""

    sizes: LocalSizes
    legs: dict[Leg, int] = field(default_factory=dict)  # numbered as they are met
    _codes: dict[str, int] = field(default_factory=dict)  # of kinds of placement
    _forms: dict[bytes, int] = field(default_factory=dict)  # of what steps on an axis follow from
    _routes: dict[object, _Route | None] = field(default_factory=dict)
    _tables: dict[object, Routes] = field(default_factory=dict)
    _even: dict[tuple[Shape, Layout], bool] = field(default_factory=dict)

    def routes(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> Routes:
        """Return the routes from each source to each target."""
        key = shape, tuple(sources), tuple(targets)
        if key not in self._tables:
            self._tables[key] = self._found(shape, sources, targets)
        return self._tables[key]

    def _found(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> Routes:
        """Find routes by `plan_steps`: on even layouts, once for all reshards that are alike.

        Of a tensor with fewer elements than ranks, steps send mostly padding, so that other routes are the shortest.
        """
        is_small = math.prod(shape) < self.sizes.mesh.size
        odd = [np.array([0 if self._is_even(shape, one) else i for i, one in enumerate(side, 1)]) for side in (sources, targets)]
        wanted = [_listed([target.placements[axis] for target in targets]) for axis in range(self.sizes.mesh.ndim)]
        alike = [self._alike(axis, sources, wanted) for axis in range(self.sizes.mesh.ndim)]
        ids = [odd[0][:, None], odd[1][None, :], *(one.ids for one in alike)]
        _, first, back = np.unique(_numbers(ids), return_index=True, return_inverse=True)
        i, j = np.unravel_index(first, (len(sources), len(targets)))
        is_odd = (odd[0][i] > 0) | (odd[1][j] > 0)
        keys = zip(*(one.forms[one.ids[i, j]].tolist() for one in alike), strict=True)
        routes = []
        for one, two, like_no_other, key in zip(i.tolist(), j.tolist(), is_odd.tolist(), keys, strict=True):
            ends = sources[one], targets[two], shape
            at: object = ends if like_no_other or is_small else key
            if at not in self._routes:
                self._routes[at] = self._planned(*ends)
            routes.append(self._routes[at])
        legs = np.full((len(routes), max((len(route) for route in routes if route), default=0)), -1)
        for number, route in enumerate(routes):
            legs[number, : len(route or ())] = route or ()
        impossible = np.array([route is None for route in routes])
        return Routes(legs, impossible, back.reshape(len(sources), len(targets)))

    def _is_even(self, shape: Shape, layout: Layout) -> bool:
        key = shape, layout
        if key not in self._even:
            self._even[key] = is_even(layout, shape, self.sizes.mesh)
        return self._even[key]

    def _alike(self, axis: int, sources: Sequence[Layout], wanted: Sequence[_Listed]) -> _Alike:
        """Number the reshards on an axis, per source and target: by its placements, and whether its digit fits beside
        each of the target's."""
        (have, position), size = _listed([source.placements[axis] for source in sources]), self.sizes.mesh.sizes[axis]
        listed, at = wanted[axis]
        codes, wishes = (np.array([self._codes.setdefault(_code(p), len(self._codes)) for p in s]) for s in (have, listed))
        fields = [codes[:, None], wishes[at][None, :], np.array([[p == q for q in listed] for p in have])[:, at]]
        for (others, at), width in zip(wanted, self.sizes.mesh.sizes, strict=True):
            fields.append(np.array([[_are_apart(p, size, q, width) for q in others] for p in have])[:, at])
        _, first, ids = np.unique(_numbers(fields), return_index=True, return_inverse=True)
        rows = np.stack([np.broadcast_to(one, fields[-1].shape).ravel()[first] for one in fields], axis=1)
        forms = [self._forms.setdefault(row.tobytes(), len(self._forms)) for row in rows.astype(np.int32)]
        return _Alike(ids.reshape(fields[-1].shape)[position], np.array(forms))

    def _planned(self, source: Layout, target: Layout, shape: Shape) -> _Route | None:
        try:
            steps = plan_steps(source, target, shape, self.sizes.mesh)
        except CompilerError:
            return None
        parts = [self.sizes.part(shape, layout) for layout in (source, *(step.layout for step in steps))]
        legs = zip(steps, parts, parts[1:], strict=False)
        found = (Leg(step.kind, step.axes, before, after) for step, before, after in legs)
        return tuple(self.legs.setdefault(leg, len(self.legs)) for leg in found)


def _code(placement: Placement) -> str:
    return "S" if isinstance(placement, Shard) else str(placement)


def _are_apart(one: Placement, size: int, other: Placement, width: int) -> bool:
    """Return whether digits, over `size` and `width` ranks, do not overlap."""
    if not (isinstance(one, Shard) and isinstance(other, Shard)) or one.dim != other.dim:
        return True
    pairs = product(_digits(one, size), _digits(other, width))
    return all(b % (a * n) == 0 or a % (b * m) == 0 or (a == b and is_half and too) for (a, n, is_half), (b, m, too) in pairs)


def _digits(placement: Shard, size: int) -> list[tuple[int, int, bool]]:
    """Return the digits that a placement takes: the product of those before each, its size, and whether it is a half."""
    axis = (placement.outer, size, False)
    return [axis, (placement.half, 2, True)] if placement.mirror else [axis]


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
