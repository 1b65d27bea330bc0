"""Read `Options(params=..., inputs=..., outputs=...)`: constraints on placements, checked against the model and the mesh."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed.tensor as dt

from autoshard.config.axis_recipes import recipes_of
from autoshard.config.options import Options, Placements
from passes.errors import ConstraintError, GraphTextError, MeshError
from passes.ir.layout import Partial, Placement, R, Shard, is_even, next_digit, parse_placement, replicated
from passes.ir.mesh import Mesh
from passes.seed import Constraint


def check_options(options: Options, mesh: Mesh) -> None:
    """Raise RecipeError or MeshError for options that cannot work with any model."""
    recipes_of(options.recipe, mesh)
    for what, placements in (("params", options.params), ("inputs", options.inputs), ("outputs", options.outputs)):
        for pattern, axes in (placements or {}).items():
            try:
                for axis in axes:
                    mesh.index(axis)
            except MeshError as error:
                raise MeshError(f"Options({what}=...): {pattern!r}: {error}") from error


def constraints_on(
    given: Placements | None, what: str, shapes: Mapping[str, Sequence[int]], mesh: Mesh
) -> tuple[Constraint, ...]:
    """Return the constraints on values of one kind (`what`: "params", "inputs" or "outputs"), with globs resolved.

    Raises ConstraintError for a glob that matches nothing, a dim that a value does not have or whose size the axis
    does not divide, or a placement that cannot be read; MeshError for an unknown axis.
    """
    found: dict[tuple[str, str], Constraint] = {}
    for pattern, axes in (given or {}).items():
        names = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ConstraintError(_no_match(pattern, what, tuple(shapes)))
        for name in names:
            for axis, placement in axes.items():
                mesh.index(axis)
                found[name, axis] = Constraint(name, axis, placement_of(placement, what, name, shapes[name]))
    for name in shapes:
        _check_even(name, what, shapes[name], [one for one in found.values() if one.name == name], mesh)
    return tuple(found.values())


def _no_match(pattern: str, what: str, names: tuple[str, ...]) -> str:
    return f"Options({what}=...): {pattern!r} matches none of the {len(names)} {what} of the model; {names_like(pattern, names)}"


def names_like(given: str, names: Sequence[str]) -> str:
    """Return the end of a message about a name that is unknown: some of the known ones, the closest if any is close."""
    close = difflib.get_close_matches(given, names, n=3) or names[:3]
    return f"names look like {', '.join(map(repr, close)) or 'nothing: there are none'}"


def placement_of(given: dt.Placement | str, what: str, name: str, shape: Sequence[int]) -> Placement:
    """Parse a placement given by the user for a value of this shape. Raises ConstraintError."""
    try:
        placement = parse_placement(given) if isinstance(given, str) else _from_dtensor(given)
        placement = None if isinstance(placement, Partial) else placement
    except GraphTextError as error:
        raise ConstraintError(
            f"Options({what}=...): {name!r}: cannot read the placement {given!r}; use Shard(dim) or Replicate(), "
            "or write 'S(dim)', 'S(dim/outer)', 'S(dim~)' or 'R'"
        ) from error
    if placement is None:
        raise ConstraintError(
            f"Options({what}=...): {name!r} cannot be {given}; use Shard(dim) or Replicate() "
            "(a value becomes partial by itself where an op makes it so)"
        )
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        dims = "its only dim is 0" if len(shape) == 1 else f"its dims are 0 to {len(shape) - 1}"
        dims = dims if shape else "a scalar can only be replicated"
        raise ConstraintError(
            f"Options({what}=...): {name!r} of shape {list(shape)} has no dim {placement.dim}; {dims}"
        )
    if placement.mirror and what == "params":
        raise ConstraintError(
            f"Options(params=...): {name!r} cannot be {placement}: no DTensor is stored so; use Shard({dim}), as only inputs and "
            "outputs can be mirrored"
        )
    return replace(placement, dim=dim)


def _from_dtensor(given: dt.Placement) -> Placement | None:
    if isinstance(given, dt.Replicate):
        return R
    return Shard(given.dim) if isinstance(given, dt.Shard) else None


def _check_even(name: str, what: str, shape: Sequence[int], constraints: list[Constraint], mesh: Mesh) -> None:
    """Raise ConstraintError if constraints split a dim unevenly, or cut through each other's parts."""
    shards = {one.axis: one.placement for one in constraints if isinstance(one.placement, Shard)}
    for dim, size in enumerate(shape):
        _check_dim(name, what, dim, size, {axis: shard for axis, shard in shards.items() if shard.dim == dim}, mesh)
    layout = replicated(mesh)
    for axis, shard in shards.items():
        if mesh.axis_size(axis) > 1:
            inner = next_digit(layout, shard.dim, mesh, mirror=shard.mirror > 0) if shard.is_bare else shard
            layout = layout.with_on(mesh.index(axis), inner)
    if not is_even(layout, shape, mesh):
        raise ConstraintError(
            f"Options({what}=...): the placements of {name!r} cut through each other: {layout.format(mesh)}; leave out the "
            "second number, as in 'S(0)', and each axis splits what those before it left over"
        )


def _check_dim(name: str, what: str, dim: int, size: int, shards: Mapping[str, Shard], mesh: Mesh) -> None:
    ways = math.prod(mesh.axis_size(axis) for axis in shards)
    parts = math.lcm(ways, *(mesh.axis_size(axis) * shard.outer for axis, shard in shards.items()))
    if size % parts:
        inside = f" in each of {parts // ways} parts" if parts != ways else ""
        raise ConstraintError(
            f"Options({what}=...): dim {dim} of {name!r} has {size} entries, which {' x '.join(shards)} = {ways}{inside} "
            f"does not divide; shard another dim, or change the size to a multiple of {parts}"
        )
