"""Layouts: how a value is distributed over a mesh, one placement per axis.

A sharded tensor dim is a digit of its index. Write the index `i` of a dim of size N in mixed radix as `i = (o * n + c)
* m + r` with `o < outer`, `c < n`, `r < m` and `outer * n * m = N`: the axis of size `n` holds the elements whose digit
`c` is its coordinate. `outer = 1` is the usual contiguous shard. So one number covers three cases that otherwise need a
concept each:

- the order of two axes on one dim: `{tp:S(0), dp:S(0/2)}` with `tp=2` is tp outside, dp inside;
- a shard of an inner factor of a merged dim (a strided shard): the sequence of a flattened
  `[B*S, D]` is `S(0/B)`;
- a shard of a fused projection: q, k and v of a `[3*D, D]` weight, each sharded, is `S(0/3)`.

A digit can be mirrored: then the axis counts backwards in every second half. `S(1~)` cuts dim 1 into two halves of `n`
chunks each; coordinate `c` holds chunk `c` of the first and chunk `n - 1 - c` of the second, which is equal work where
later positions take longer. `S(0/3~)` does so in each of three parts. `mirror` is the number of digits between the
half and the axis's own: more than 1 where other axes count with it, as in `{a:S(1~), b:S(1~2)}`.

Every reshape keeps digits of the flat index, so a local reshape of a local tensor is always right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from passes.errors import GraphTextError
from passes.ir.mesh import Mesh

PARTIAL_OPS = ("sum", "max", "min", "product", "avg")
IDENTITIES = {"sum": 0, "product": 1}  # neutral terms; for the other ops, equal terms reduce to themselves


class _Interned(type):
    """Base of values of which equal ones are one object, since a search compares and hashes them millions of times."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        cls.known: dict[tuple[Any, ...], Any] = {}  # by the arguments that were given, and by all

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = None if kwargs else cls.known.get(args)
        if found is None:
            made = super().__call__(*args, **kwargs)
            found = cls.known.setdefault(_values(made), made)
            if not kwargs:
                cls.known[args] = found
        return found


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, field.name) for field in fields(value))


class _Single(metaclass=_Interned):
    """Base of placements and layouts: pickling and copying rebuild the value, so that it stays one object."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), _values(self)


@dataclass(frozen=True, eq=False)
class Replicate(_Single):
    """Every rank of the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, eq=False)
class Shard(_Single):
    """Each rank of the axis holds the part of `dim` whose digit after `outer` is its coordinate.

    If `mirror` is not 0, the digit counts backwards where `o // mirror` is odd, `o` being the value of the digits before it.
    """

    dim: int
    outer: int = 1
    mirror: int = 0

    def __str__(self) -> str:
        parts = self.outer // (2 * self.mirror) if self.mirror else self.outer
        mirrored = "" if not self.mirror else "~" if self.mirror == 1 else f"~{self.mirror}"
        return f"S({self.dim}{f'/{parts}' if parts > 1 else ''}{mirrored})"

    @property
    def is_bare(self) -> bool:
        """Return whether nothing is counted before it, as in `S(0)` and `S(0~)`, so that other axes may stand there."""
        return (self.outer, self.mirror) in ((1, 0), (2, 1))

    @property
    def half(self) -> int:
        """Return the product of the digits before the one that says in which half a mirrored digit is."""
        return self.outer // (2 * self.mirror)

    def place(self, outside: int, size: int, coordinate: int) -> int:
        """Return the digit that a coordinate holds where the digits before it have the value `outside`."""
        return size - 1 - coordinate if self.mirror and outside // self.mirror % 2 else coordinate


@dataclass(frozen=True, eq=False)
class Partial(_Single):
    """Each rank of the axis holds a term; the value is their reduction by `op`."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Replicate | Shard | Partial
R = Replicate()


@dataclass(frozen=True, eq=False)
class Layout(_Single):
    """The placements of a value, one per mesh axis, in mesh order."""

    placements: tuple[Placement, ...]

    def on(self, axis: int) -> Placement:
        return self.placements[axis]

    def with_on(self, axis: int, placement: Placement) -> Layout:
        return Layout(self.placements[:axis] + (placement,) + self.placements[axis + 1 :])

    def axes_on(self, dim: int) -> tuple[int, ...]:
        """Return the axes that shard `dim`, outermost digit first."""
        return _axes_on(self.placements, dim)

    @property
    def is_replicated(self) -> bool:
        return all(p == R for p in self.placements)

    @property
    def has_partial(self) -> bool:
        return any(isinstance(p, Partial) for p in self.placements)

    def format(self, mesh: Mesh) -> str:
        """Return `{dp:S(0), tp:R}`."""
        return _format(self.placements, mesh.names)


@lru_cache(maxsize=1 << 14)
def _axes_on(placements: tuple[Placement, ...], dim: int) -> tuple[int, ...]:
    found = [(p.outer, a) for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    return tuple(axis for _, axis in sorted(found))


@lru_cache(maxsize=1 << 14)
def _format(placements: tuple[Placement, ...], names: tuple[str, ...]) -> str:
    return "{" + ", ".join(f"{n}:{p}" for n, p in zip(names, placements, strict=True)) + "}"


def replicated(mesh: Mesh) -> Layout:
    return Layout((R,) * mesh.ndim)


def parse_placement(text: str) -> Placement:
    """Return the placement that `str(placement)` wrote."""
    text = text.strip()
    if text == "R":
        return R
    if match := re.fullmatch(r"S\((\d+)(?:/(\d+))?(?:(~)(\d+)?)?\)", text):
        mirror = int(match[4] or 1) if match[3] else 0
        return Shard(int(match[1]), int(match[2] or 1) * (2 * mirror or 1), mirror)
    if (match := re.fullmatch(r"P\((\w+)\)", text)) and match[1] in PARTIAL_OPS:
        return Partial(match[1])
    raise GraphTextError(f"cannot read placement {text!r}; write R, S(dim), S(dim/outer), S(dim~) or P(sum)")


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Return the layout that `Layout.format` wrote; an axis that is not named is replicated."""
    placements: list[Placement] = [R] * mesh.ndim
    for part in text.strip().removeprefix("{").removesuffix("}").split(","):
        axis, _, placement = part.partition(":")
        if axis.strip():
            placements[mesh.index(axis.strip())] = parse_placement(placement)
    return Layout(tuple(placements))


def fits(placement: Placement, shape: Sequence[int], size: int) -> bool:
    """Return whether `placement` on an axis of `size` splits `shape` evenly."""
    if not isinstance(placement, Shard):
        return True
    return placement.dim < len(shape) and shape[placement.dim] % (placement.outer * size) == 0


def is_even(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Return whether all axes split `shape` into equal parts, with digits that do not overlap."""
    return is_even_over(layout.placements, tuple(shape), mesh.sizes)


@lru_cache(maxsize=1 << 16)
def is_even_over(placements: tuple[Placement, ...], shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether axes of these `sizes` split `shape` as `is_even` says."""
    dims = dict.fromkeys(p.dim for p in placements if isinstance(p, Shard))
    return all(dim < len(shape) and _dim_is_even(Layout(placements), dim, shape[dim], sizes) for dim in dims)


def next_digit(layout: Layout, dim: int, mesh: Mesh, *, mirror: bool = False) -> Shard:
    """Return the digit of `dim` inside those that the axes of `layout` already use.

    With `mirror`, it is mirrored: with the axis before it, if that is, so that both count as one; else in halves of its own.
    """
    axes = layout.axes_on(dim)
    outer = math.prod(mesh.sizes[axis] for axis in axes)
    for axis in axes:
        placement = layout.on(axis)
        assert isinstance(placement, Shard)
        outer = max(outer, placement.outer * mesh.sizes[axis])
        if axis == axes[-1] and mirror and placement.mirror:
            return Shard(dim, outer, placement.mirror * mesh.sizes[axis])
    return Shard(dim, 2 * outer, 1) if mirror else Shard(dim, outer)


def is_storable(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Return whether a value of `shape` can have `layout`: otherwise it cannot be stored, moved or lowered.

    Like `is_even`, but the innermost digit of a dim may be padded, as parameters are. Operands of calls must be even.
    """
    return _is_storable(layout, tuple(shape), mesh.sizes)


@lru_cache(maxsize=1 << 16)
def _is_storable(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    if any(isinstance(placement, Shard) and placement.dim >= len(shape) for placement in layout.placements):
        return False
    for dim, size in enumerate(shape):
        axes = layout.axes_on(dim)
        if not axes:
            continue
        inner = axes[-1]
        outside = layout.with_on(inner, R)
        placement = layout.on(inner)
        assert isinstance(placement, Shard)
        if placement.mirror:
            if not _dim_is_even(layout, dim, size, sizes):
                return False
            continue
        if not _dim_is_even(outside, dim, size, sizes) or size % placement.outer:
            return False
        if any(placement.outer % _end(layout, a, sizes) for a in axes[:-1]):
            return False
    return True


def _dim_is_even(layout: Layout, dim: int, size: int, sizes: tuple[int, ...]) -> bool:
    """Return whether digits of a dim do not overlap: those of axes, and the halves of mirrored ones."""
    digits = set[tuple[int, int, int]]()  # product of those before it, size, and the axis
    for axis in layout.axes_on(dim):
        placement = layout.on(axis)
        assert isinstance(placement, Shard)
        digits.add((placement.outer, sizes[axis], axis))
        if placement.mirror:
            if placement.outer % (2 * placement.mirror):
                return False
            digits.add((placement.half, 2, -1))
    end = 1
    for outer, length, _ in sorted(digits):
        if outer % end:
            return False
        end = outer * length
    return size % end == 0


def _end(layout: Layout, axis: int, sizes: tuple[int, ...]) -> int:
    placement = layout.on(axis)
    assert isinstance(placement, Shard)
    return placement.outer * sizes[axis]


def local_shape(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of one rank's part, padding included."""
    return _local_shape(layout, tuple(shape), mesh.sizes)


@lru_cache(maxsize=1 << 16)
def _local_shape(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    local = []
    for dim, size in enumerate(shape):
        axes = layout.axes_on(dim)
        even = math.prod(sizes[a] for a in axes)
        if axes and size % _end(layout, axes[-1], sizes):
            placement = layout.on(axes[-1])
            assert isinstance(placement, Shard)
            before = math.prod(sizes[a] for a in axes[:-1])
            local.append(placement.outer // before * -(-(size // placement.outer) // sizes[axes[-1]]))
        else:
            local.append(size // even)
    return tuple(local)


def local_part(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Return one rank's part of a global tensor.

    Of a partial value, coordinate 0 gets the whole and the others the reduction's identity (for max, min and avg, all
    get the value itself).
    """
    for dim in range(tensor.dim()):
        for axis in reversed(layout.axes_on(dim)):
            placement = layout.on(axis)
            assert isinstance(placement, Shard)
            tensor = take_digit(tensor, placement, mesh.sizes[axis], coordinate[axis])
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial) and placement.op in IDENTITIES and coordinate[axis]:
            tensor = torch.full_like(tensor, IDENTITIES[placement.op])
    return tensor


def take_digit(tensor: torch.Tensor, placement: Shard, size: int, coordinate: int) -> torch.Tensor:
    """Return the elements of `tensor` whose digit is `coordinate`, padding a dim that does not divide with zeros.

    Digits outside this one must still be whole in `tensor`: take inner digits first.
    """
    dim, outer = placement.dim, placement.outer
    length = tensor.shape[dim] // outer
    part = -(-length // size)
    split = _split(tensor, dim, outer)
    if placement.mirror:
        places = [placement.place(outside, size, coordinate) for outside in range(outer)]
        numbers = torch.tensor([o * size + place for o, place in enumerate(places)], device=tensor.device)
        return _split(tensor, dim, outer * size).index_select(dim, numbers).flatten(dim, dim + 1)
    if part * size != length:
        pad = [0, 0] * (split.dim() - dim - 2) + [0, part * size - length]
        split = torch.nn.functional.pad(split, pad)
    return split.narrow(dim + 1, coordinate * part, part).flatten(dim, dim + 1)


def assemble(parts: Sequence[torch.Tensor], shape: Sequence[int], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """Return the global tensor of shape `shape` from every rank's part, in the order of `mesh.ranks`."""
    grid = dict(zip(mesh.coordinates(), parts, strict=True))
    placements = list(layout.placements)
    order = [a for a, p in enumerate(placements) if not isinstance(p, Shard)]
    order += [a for dim in range(len(shape)) for a in layout.axes_on(dim)]
    # Partial and replicated axes first, then outer digits before inner ones.
    for axis in order:
        placement = placements[axis]
        merged: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for coordinate, part in grid.items():
            key = coordinate[:axis] + (0,) + coordinate[axis + 1 :]
            merged.setdefault(key, []).append(part)
        grid = {key: _merge(group, placement) for key, group in merged.items()}
    whole = grid[(0,) * mesh.ndim]
    return _unpad(whole, shape, layout)


def _merge(group: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if isinstance(placement, Replicate):
        return group[0]
    stacked = torch.stack(group)
    if isinstance(placement, Partial):
        return reduce_terms(stacked, placement.op)
    # Outer digits were merged before, so `outer` of the part is whole.
    outer = placement.outer
    dim, size = placement.dim, len(group)
    part = torch.stack([_split(t, dim, outer) for t in group]).movedim(0, dim + 1).flatten(dim, dim + 1)
    if placement.mirror:
        places = [o * size + placement.place(o, size, place) for o in range(outer) for place in range(size)]
        part = part.index_select(dim, torch.tensor(places, device=part.device))
    return part.flatten(dim, dim + 1)


def reduce_terms(stacked: torch.Tensor, op: str) -> torch.Tensor:
    """Return the value of a partial one, from its terms along dim 0."""
    match op:
        case "sum":
            return stacked.sum(0).to(stacked.dtype)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0).to(stacked.dtype)
        case _:
            return stacked.mean(0)


def _split(tensor: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """View `dim` as `[outer, rest]`."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])


def _unpad(whole: torch.Tensor, shape: Sequence[int], layout: Layout) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if whole.shape[dim] == size:
            continue
        placement = layout.on(layout.axes_on(dim)[-1])
        assert isinstance(placement, Shard)
        split = _split(whole, dim, placement.outer)
        whole = split.narrow(dim + 1, 0, size // placement.outer).flatten(dim, dim + 1)
    return whole
