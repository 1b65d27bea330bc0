"""A mesh of ranks with named axes; no process group, no device.

Ranks are laid out row-major: the last axis varies fastest, as in `DeviceMesh`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from passes.errors import MeshError
from passes.hardware.hardware import Group, Hardware, hardware_named

MOST_RANKS = 1 << 20  # of a mesh: ten times the largest training job, so that a mistyped size is an error and not a long wait


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes: `Mesh("dp=2,tp=4")` or `Mesh.of(dp=2, tp=4)`.

    `ranks` are the global ranks in row-major order, by default `0 .. size-1`. `hardware` describes the devices and
    their links: a preset's name (`"h100"`), the path of a calibrated file, or `Hardware`; None: unknown.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    hardware: Hardware | None = field(repr=False)

    def __init__(
        self,
        names: str | tuple[str, ...],
        sizes: tuple[int, ...] | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        hardware: str | Hardware | None = None,
    ) -> None:
        if isinstance(names, str):
            if sizes is not None:
                raise MeshError("give a mesh as 'dp=2,tp=4', or as names and sizes, not both")
            names, sizes = _parse_axes(names)
        _check_types(names, sizes, hardware)
        if sizes is None or len(names) != len(sizes):
            raise MeshError(f"mesh axes {names} need as many sizes, got {sizes}")
        if len(set(names)) != len(names):
            raise MeshError(f"mesh axes {names} are not distinct; rename one of them")
        for name, size in zip(names, sizes, strict=True):
            if not name.isidentifier():
                raise MeshError(f"mesh axis {name!r} is not a name; use letters, digits and '_'")
            if size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size}; it must be 1 or more")
        size = math.prod(sizes)
        if size > MOST_RANKS:
            raise MeshError(f"a mesh of {size:,} ranks is larger than {MOST_RANKS:,}; give smaller sizes")
        ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        if len(ranks) != size:
            raise MeshError(f"a mesh of {size} places needs {size} ranks, got {len(ranks)}")
        object.__setattr__(self, "names", tuple(names))
        object.__setattr__(self, "sizes", tuple(sizes))
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "hardware", hardware_named(hardware) if isinstance(hardware, str) else hardware)
        object.__setattr__(self, "_shapes", {})

    def __hash__(self) -> int:
        return hash((self.names, self.sizes))  # not the ranks: there may be thousands

    @staticmethod
    def of(**axes: int) -> Mesh:
        """Return a mesh by axes: `Mesh.of(dp=2, tp=4)`."""
        return Mesh(tuple(axes), tuple(axes.values()))

    def on(self, hardware: Hardware | None) -> Mesh:
        """Return the same mesh on other hardware."""
        return Mesh(self.names, self.sizes, ranks=self.ranks, hardware=hardware)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def ndim(self) -> int:
        return len(self.names)

    def index(self, axis: str) -> int:
        """Return the position of `axis`. Raises MeshError if the mesh has no such axis."""
        if axis not in self.names:
            raise MeshError(f"unknown mesh axis {axis!r}; this mesh has {self}: name one of these")
        return self.names.index(axis)

    def axis_size(self, axis: str) -> int:
        return self.sizes[self.index(axis)]

    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Return the coordinates of all ranks, in the order of `ranks`."""
        return tuple(product(*(range(size) for size in self.sizes)))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the places (indices into `ranks`) that differ only on `axes`, one tuple per group.

        Inside a group the order is row-major over `axes` in mesh order.
        """
        moving = tuple(sorted(self.index(axis) for axis in axes))
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, coordinate in enumerate(self.coordinates()):
            key = tuple(c for i, c in enumerate(coordinate) if i not in moving)
            groups.setdefault(key, []).append(place)
        return tuple(tuple(group) for group in groups.values())

    def group_shape(self, axes: tuple[str, ...]) -> Group:
        """Return the number of ranks of a group over `axes`, of its nodes, and of its ranks on the node with fewest.

        If groups differ, these are of the group on most nodes. If the hardware is unknown, all ranks are on one node.
        """
        shapes: dict[tuple[str, ...], Group] = self._shapes  # type: ignore[attr-defined]
        if axes not in shapes:
            shapes[axes] = self._group_shape(axes)
        return shapes[axes]

    def _group_shape(self, axes: tuple[str, ...]) -> Group:
        moving = sorted({self.index(axis) for axis in axes})
        ranks = math.prod(self.sizes[i] for i in moving)
        if self.hardware is None:
            return Group(ranks)
        nodes = np.array(self.ranks).reshape(self.sizes) // self.hardware.node_size
        groups = np.moveaxis(nodes, moving, range(len(moving))).reshape(ranks, -1).T
        counts = (np.unique(group, return_counts=True)[1] for group in np.unique(np.sort(groups), axis=0))
        worst = max((len(count), -int(count.min())) for count in counts)
        return Group(ranks, worst[0], -worst[1])

    def group_name(self, axes: tuple[str, ...]) -> str:
        """Return the name of groups over `axes`, the same on all ranks.

        Equal names keep graphs equal on all ranks; the name contains the mesh, so that two meshes in one process do not
        share groups.
        """
        where = f"{self}"
        if self.ranks != tuple(range(self.size)):
            where += "@" + hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]
        return f"autoshard:{where}:{'.'.join(axes)}"

    def axes_of_group(self, name: str) -> tuple[str, ...]:
        """Return the axes of a group from its `group_name`."""
        axes = tuple(name.rsplit(":", 1)[-1].split("."))
        for axis in axes:
            self.index(axis)
        return axes

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def _check_types(names: object, sizes: object, hardware: object) -> None:
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        pairs = names.items() if isinstance(names, dict) else (("dp", 2), ("tp", 4))
        text = ",".join(f"{name}={size}" for name, size in pairs)
        raise MeshError(f"Mesh({names!r}): write axes and sizes as text: Mesh({text!r})")
    if not isinstance(sizes, tuple | list | None) or not all(type(size) is int for size in sizes or ()):
        raise MeshError(f"Mesh({names!r}, {sizes!r}): give one whole number per axis: Mesh(('dp', 'tp'), (2, 4))")
    if not isinstance(hardware, str | Hardware | None):
        raise MeshError(
            f"Mesh(..., hardware={hardware!r}): give a preset such as 'h100', the path of a calibrated .json, or None"
        )
    if hardware == "auto":
        raise MeshError(
            f"{hardware=} is no hardware of a mesh: leave it out for this machine's, which options take by default, or give a "
            "preset such as 'h100'"
        )


def _parse_axes(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names, sizes = [], []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.strip().isdigit():
            raise MeshError(f"cannot read {part!r} in mesh {text!r}; write it as 'dp=2,tp=4'")
        names.append(name.strip())
        sizes.append(int(size))
    return tuple(names), tuple(sizes)
