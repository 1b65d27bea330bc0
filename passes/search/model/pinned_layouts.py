"""Find the layouts that a placeholder, or a value with pins, can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from torch.fx import Node

from passes.errors import ConstraintError
from passes.ir.graph import InputRole, input_of, pins_of, tensor_of
from passes.ir.layout import Layout, R, Shard, is_even, is_storable, next_digit
from passes.ir.mesh import Mesh
from passes.ir.padding import PAD_END
from passes.search.model.axis_groups import AxisGroups


def pinned_layouts(node: Node, free: Sequence[Layout], mesh: Mesh, axis_groups: AxisGroups) -> list[Layout]:
    """Return the layouts of a node that meet its pins, out of those that it could have without pins.

    A parameter may also be padded. Raises ConstraintError if none is left.
    """
    shape = tuple(tensor_of(node).shape)
    is_parameter = node.op == "placeholder" and input_of(node).role is InputRole.PARAMETER
    found = [*free]
    if is_parameter:
        found += [*_padded(free, shape, mesh, axis_groups), *_padded_by_calls(node, free, mesh, axis_groups)]
    allowed = is_storable if is_parameter else is_even
    for pin in pins_of(node):
        found = [layout.with_on(pin.axis, pin.placement) for layout in found]
    found = [layout for layout in dict.fromkeys(found) if allowed(layout, shape, mesh)]
    if not found:
        pins = ", ".join(f"{mesh.names[pin.axis]}:{pin.placement} ({pin.reason})" for pin in pins_of(node))
        raise ConstraintError(f"{node.name} of shape {list(shape)} cannot meet its constraints: {pins}")
    return found


def _padded(layouts: Sequence[Layout], shape: tuple[int, ...], mesh: Mesh, axis_groups: AxisGroups) -> Iterator[Layout]:
    """Yield layouts that pad dim 0, on sets of axes that split no dim evenly."""
    even = {_sharded_axes(layout) for layout in layouts}
    for layout, group in product(layouts, axis_groups if shape else ()):
        wider = _split(layout, 0, group, mesh)
        if _sharded_axes(wider) not in even and is_storable(wider, shape, mesh):
            yield wider


def _padded_by_calls(
    node: Node, layouts: Sequence[Layout], mesh: Mesh, axis_groups: AxisGroups
) -> Iterator[Layout]:
    """Yield layouts that pad a dim that is padded before its use, and so has these parts then."""
    shape = tuple(tensor_of(node).shape)
    dims = dict.fromkeys(int(str(user.args[1])) for user in node.users if user.target is PAD_END)
    for layout, dim, group in product(layouts, dims, axis_groups):
        wider = _split(layout, dim, group, mesh)
        if wider != layout and is_storable(wider, shape, mesh):
            yield wider


def _split(layout: Layout, dim: int, group: Sequence[int], mesh: Mesh) -> Layout:
    """Return a layout that splits `dim` over the axes of a group, too, if they split nothing yet."""
    if all(layout.on(axis) == R and mesh.sizes[axis] > 1 for axis in group):
        for axis in group:
            layout = layout.with_on(axis, next_digit(layout, dim, mesh))
    return layout


def _sharded_axes(layout: Layout) -> tuple[bool, ...]:
    return tuple(isinstance(placement, Shard) for placement in layout.placements)
