"""Groups of mesh axes that a search treats alike.

The number of strategies is exponential in that of axes. Most plans use a third axis like one of the others, so a search
over two groups of axes is fast, and finds the best plan or one near it.
"""

from __future__ import annotations

from passes.ir.mesh import Mesh

AxisGroups = tuple[tuple[int, ...], ...]  # every axis is in one; those of a group are neighbours, in mesh order
MOST_GROUPS = 3  # a matmul of a Llama has 558 strategies in three groups, and 5,330 in four: planning did not end in 5 minutes


def single_axes(mesh: Mesh) -> AxisGroups:
    """Return groups of one axis each."""
    return tuple((axis,) for axis in range(mesh.ndim))


def coarse_groups(mesh: Mesh) -> tuple[AxisGroups, ...]:
    """Return two ways to divide the axes with more than one rank into two groups; none if there are at most two such
    axes.

    The inner group holds those of the last axes that stay inside a node; if all or none do, it holds the last axis. The
    other way has one more axis in the inner group, or one less if there is no more.
    """
    real = _real(mesh)
    if len(real) <= 2:
        return ()
    inside = [first for first in range(len(real)) if _is_inside(mesh, real[first:])]
    first = inside[0] if inside and inside[0] else len(real) - 1
    other = first - 1 if first > 1 else first + 1
    idle = [(axis,) for axis, size in enumerate(mesh.sizes) if size == 1]
    return tuple((tuple(real[:at]), tuple(real[at:]), *idle) for at in (first, other))


def can_be_single(mesh: Mesh) -> bool:
    """Return whether the axes are few enough to be searched one by one."""
    return len(_real(mesh)) <= MOST_GROUPS


def finer_groups(axis_groups: AxisGroups) -> tuple[AxisGroups, ...]:
    """Return the ways to divide one of the groups into two."""
    return tuple(
        (*axis_groups[:at], group[:first], group[first:], *axis_groups[at + 1 :])
        for at, group in enumerate(axis_groups)
        for first in range(1, len(group))
    )


def format_axis_groups(axis_groups: AxisGroups, mesh: Mesh) -> str:
    """Return `"dp and cp"`, or `"dp and cp, ep and tp"`; empty if each axis is a group."""
    return ", ".join(" and ".join(mesh.names[axis] for axis in group) for group in axis_groups if len(group) > 1)


def _real(mesh: Mesh) -> list[int]:
    """Return the axes that have more than one rank."""
    return [axis for axis, size in enumerate(mesh.sizes) if size > 1]


def _is_inside(mesh: Mesh, axes: list[int]) -> bool:
    return mesh.group_shape(tuple(mesh.names[axis] for axis in axes)).nodes == 1
