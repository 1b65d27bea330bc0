"""Groups of mesh axes that a search treats alike.

The number of strategies is exponential in that of axes. Most plans use a third axis like one of the others, so a search
over two groups of axes is fast, and finds the best plan or one near it.
"""

from __future__ import annotations

from passes.ir.mesh import Mesh

AxisGroups = tuple[tuple[int, ...], ...]  # every axis is in one; those of a group are neighbours, in mesh order


def single_axes(mesh: Mesh) -> AxisGroups:
    """Return groups of one axis each."""
    return tuple((axis,) for axis in range(mesh.ndim))


def coarse_groups(mesh: Mesh) -> tuple[AxisGroups, ...]:
    """Return two ways to divide the axes with more than one rank into two groups; none if there are at most two such
    axes.

    The inner group holds those of the last axes that stay inside a node; if all or none do, it holds the last axis. The
    other way has one more axis in the inner group, or one less if there is no more.
    """
    real = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    if len(real) <= 2:
        return ()
    inside = [first for first in range(len(real)) if _is_inside(mesh, real[first:])]
    first = inside[0] if inside and inside[0] else len(real) - 1
    other = first - 1 if first > 1 else first + 1
    idle = [(axis,) for axis, size in enumerate(mesh.sizes) if size == 1]
    return tuple((tuple(real[:at]), tuple(real[at:]), *idle) for at in (first, other))


def format_axis_groups(axis_groups: AxisGroups, mesh: Mesh) -> str:
    """Return `"dp and cp"`, or `"dp and cp, ep and tp"`; empty if each axis is a group."""
    return ", ".join(" and ".join(mesh.names[axis] for axis in group) for group in axis_groups if len(group) > 1)


def _is_inside(mesh: Mesh, axes: list[int]) -> bool:
    return mesh.group_shape(tuple(mesh.names[axis] for axis in axes)).nodes == 1
