"""What the user insists on, checked against the model and the mesh: recipes per axis, placements per value."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence

import torch.distributed.tensor as dt

from autoshard.config.axis_names import usual_recipe
from autoshard.config.options import AUTO, Options, Placements
from passes.errors import ConstraintError, GraphTextError, RecipeError
from passes.ir.layout import Partial, Placement, R, Shard, is_even, parse_placement, replicated
from passes.ir.mesh import Mesh
from passes.recipes.data import next_digit
from passes.seed import Insisted

RECIPES = ("ddp", "zero2", "fsdp", "hsdp", "megatron")


def recipes_of(recipe: str | Mapping[str, str | None] | None, mesh: Mesh) -> tuple[str | None, ...]:
    """One recipe (or None) per axis of `mesh`. Raises RecipeError, and MeshError for an unknown axis."""
    if recipe is None:
        return (None,) * mesh.ndim
    if recipe == AUTO:
        return rule_of_thumb(mesh)
    if isinstance(recipe, str):
        return _hybrid(_spread(recipe, mesh), mesh)
    if not isinstance(recipe, Mapping):
        raise RecipeError(
            f"Options(recipe={recipe!r}): give a name such as 'fsdp', or a recipe per axis: {{'dp': 'fsdp'}}"
        )
    chosen: list[str | None] = [None] * mesh.ndim
    for axis, name in recipe.items():
        chosen[mesh.index(axis)] = None if name is None else _known(name)
    return _hybrid(tuple(chosen), mesh)


def rule_of_thumb(mesh: Mesh) -> tuple[str | None, ...]:
    """Return `megatron` for an axis named `tp`, `fsdp` for those that carry data by their name, None for every other."""
    return tuple(map(usual_recipe, mesh.names))


def check_options(options: Options, mesh: Mesh) -> None:
    """What can be seen to be wrong before a model is captured. Raises RecipeError and MeshError."""
    recipes_of(options.recipe, mesh)
    for placements in (options.params, options.inputs, options.outputs):
        for axes in (placements or {}).values():
            for axis in axes:
                mesh.index(axis)


def _spread(recipe: str, mesh: Mesh) -> tuple[str | None, ...]:
    """`"a+b"` on n axes: `b` on the last, `a` on all before it."""
    names = [_known(name.strip()) for name in recipe.split("+")]
    if len(names) > mesh.ndim:
        raise RecipeError(
            f"recipe {recipe!r} needs {len(names)} axes, but the mesh {mesh} has {mesh.ndim}; "
            f"give one recipe per axis, such as {{{mesh.names[0]!r}: {names[0]!r}}}"
        )
    return tuple([names[0]] * (mesh.ndim - len(names)) + names)


def _known(name: str) -> str:
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = f"recipes are {', '.join(RECIPES)}, or two of them joined, such as 'fsdp+megatron'"
        raise RecipeError(f"unknown recipe {name!r}; {known}.{hint}")
    return name


def _hybrid(recipes: tuple[str | None, ...], mesh: Mesh) -> tuple[str | None, ...]:
    """`hsdp` replicates over the first of its axes and shards over the others."""
    axes = [i for i, name in enumerate(recipes) if name == "hsdp"]
    if len(axes) == 1:
        raise RecipeError(
            f"recipe 'hsdp' is on axis {mesh.names[axes[0]]!r} only; it needs two: the first replicates "
            "parameters, the others shard them. Use a mesh such as 'replicate=2,shard=4', or 'fsdp'"
        )
    return tuple("ddp" if i in axes[:1] else "fsdp" if i in axes else name for i, name in enumerate(recipes))


def insisted(
    given: Placements | None, what: str, shapes: Mapping[str, Sequence[int]], mesh: Mesh
) -> tuple[Insisted, ...]:
    """Constraints on values of one kind (`what`: "params", "inputs" or "outputs"), globs resolved.

    Raises ConstraintError for a glob that matches nothing, a dim that a value does not have or that the axis
    does not divide, a placement that cannot be read; MeshError for an unknown axis.
    """
    found: dict[tuple[str, str], Insisted] = {}
    for pattern, axes in (given or {}).items():
        names = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ConstraintError(_no_match(pattern, what, tuple(shapes)))
        for name in names:
            for axis, placement in axes.items():
                mesh.index(axis)
                found[name, axis] = Insisted(name, axis, placement_of(placement, what, name, shapes[name]))
    for name in shapes:
        _check_even(name, what, shapes[name], [one for one in found.values() if one.name == name], mesh)
    return tuple(found.values())


def _no_match(pattern: str, what: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(pattern, names, n=3) or names[:3]
    return (
        f"Options({what}=...): {pattern!r} matches none of the {len(names)} {what} of the model; "
        f"names look like {', '.join(map(repr, close)) or 'nothing: there are none'}"
    )


def placement_of(given: dt.Placement | str, what: str, name: str, shape: Sequence[int]) -> Placement:
    """A placement as a user gives it, for a value of this shape. Raises ConstraintError."""
    try:
        placement = parse_placement(given) if isinstance(given, str) else _from_dtensor(given)
        placement = None if isinstance(placement, Partial) else placement
    except GraphTextError as error:
        raise ConstraintError(
            f"Options({what}=...): {name!r}: cannot read the placement {given!r}; use Shard(dim) or Replicate(), "
            "or write 'S(dim)', 'S(dim/outer)' or 'R'"
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
        dims = f"its dims are 0 to {len(shape) - 1}" if shape else "a scalar can only be replicated"
        raise ConstraintError(
            f"Options({what}=...): {name!r} of shape {list(shape)} has no dim {placement.dim}; {dims}"
        )
    return Shard(dim, placement.outer)


def _from_dtensor(given: dt.Placement) -> Placement | None:
    if isinstance(given, dt.Replicate):
        return R
    return Shard(given.dim) if isinstance(given, dt.Shard) else None


def _check_even(name: str, what: str, shape: Sequence[int], ones: list[Insisted], mesh: Mesh) -> None:
    for dim, size in enumerate(shape):
        shards = {
            one.axis: one.placement for one in ones if isinstance(one.placement, Shard) and one.placement.dim == dim
        }
        ways = math.prod(mesh.axis_size(axis) for axis in shards)
        parts = math.lcm(ways, *(mesh.axis_size(axis) * shard.outer for axis, shard in shards.items()))
        if size % parts:
            inside = f" in each of {parts // ways} parts" if parts != ways else ""
            raise ConstraintError(
                f"Options({what}=...): dim {dim} of {name!r} has {size} entries, which {' x '.join(shards)} = {ways}{inside} "
                f"does not divide; shard another dim, or change the size to a multiple of {parts}"
            )
    layout = replicated(mesh)
    for one in ones:
        if isinstance(one.placement, Shard) and mesh.axis_size(one.axis) > 1:
            free = one.placement.outer == 1
            placement = next_digit(layout, one.placement.dim, mesh) if free else one.placement
            layout = layout.with_on(mesh.index(one.axis), placement)
    if not is_even(layout, shape, mesh):
        raise ConstraintError(
            f"Options({what}=...): the placements of {name!r} cut through each other: {layout.format(mesh)}; leave out the "
            "second number, as in 'S(0)', and each axis splits what those before it left over"
        )
