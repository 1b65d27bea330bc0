"""Define the planning problem: a captured model, a mesh with its hardware, and the user's options."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule, Node

from autoshard.capture.capture import Captured, capture_call
from autoshard.capture.garbage import uncollected
from autoshard.config.axis_recipes import AUTO, compute_axes, recipes_of, rule_of_thumb, sequence_parts
from autoshard.config.constraints import constraints_on
from autoshard.config.options import Options, Placements
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import PlanRecord
from passes.base import Remark
from passes.cast_parameters import CastParameters
from passes.cost.scheduling.bucketing import sizes
from passes.errors import ConstraintError, UserError
from passes.ir.graph import InputRole, Origin, OutputRole, input_of, outputs_of, placeholders, returned, tensor_of
from passes.ir.layout import Layout, Placement, R, Shard
from passes.ir.mesh import Mesh
from passes.ir.padding import is_gain
from passes.pad import Pad
from passes.recipes import recipe_named, with_frees
from passes.recipes.context_parallel import CONTEXT, CONTEXT_AXES
from passes.recipes.fsdp import FSDP
from passes.rules.factors import keeps_sums
from passes.search.model.unit_costs import Hiding
from passes.search.output_dims import followed, output_dims
from passes.seed import Constraint, Seed

Recipes = tuple[str | None, ...]  # one per mesh axis
_Placed = Mapping[str, Placement]  # of the first input, by axis


@dataclass(frozen=True)
class Problem:
    """A captured model and all that its candidate plans have in common.

    `stored`, `batch_axes`, `is_later` and `earlier` are as in a `PlanRequest`.
    """

    captured: Captured
    mesh: Mesh
    options: Options
    training: bool
    device: str
    cast: CastParameters
    stored: Mapping[str, Layout]
    batch_axes: tuple[int, ...] | None
    is_later: bool = False
    earlier: tuple[PlanRecord, ...] = ()
    pads: bool = True  # dims that axes do not divide are padded, and products with unequal parts are split
    padded_axes: tuple[int, ...] = ()  # axes that split the batch, which do not divide it
    compute_axes: tuple[int, ...] = ()  # axes over which products may be sharded: what they do not divide is padded

    @property
    def pad(self) -> Pad:
        """Return the pass that pads dims: for the axes that a recipe shards them over, or that a search may.

        Its `parts` are also those that products are split for.
        """
        if not self.pads:
            return Pad()
        recipes = given_recipes(self.options, self.mesh)
        parts = math.prod(self.mesh.sizes[axis] for axis in self.compute_axes)
        batch_parts = math.prod(self.mesh.sizes[axis] for axis in self.split_when_padded)
        sequences = [CONTEXT.name if name in CONTEXT_AXES else None for name in self.mesh.names]
        return Pad(parts, batch_parts, sequence_parts(sequences if recipes is None else recipes, self.mesh))

    @property
    def split_when_padded(self) -> tuple[int, ...]:
        """Return the axes that split the batch once it is padded; the inputs are whole on them."""
        return self.padded_axes if self.pads else ()

    def seed(self, gm: GraphModule, recipes: Recipes) -> Seed:
        """Return the user's constraints and the `recipes` for `gm`, the captured graph or its folded form."""
        parameters = {input_of(n).name: tensor_of(n).shape for n in placeholders(gm.graph, InputRole.PARAMETER)}
        inputs = {input_of(n).name: tensor_of(n).shape for n in placeholders(gm.graph, InputRole.INPUT)}
        outputs = {
            output.name: tensor_of(value).shape
            for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True)
            if output.role is OutputRole.OUTPUT and isinstance(value, Node)
        }
        stored = [name for name in self.captured.call.new_values.names if outputs.pop(name, None) is not None]
        whole = [Constraint(name, axis, R) for name in stored for axis in self.mesh.names]
        split = (*constraints_on(_input_placements(self), "inputs", inputs, self.mesh), *self._batch(inputs))
        placed = {one.axis: one.placement for one in split if one.name == first_batch(inputs)[0]}
        return Seed(
            self.resharding(recipes),
            tuple(one for one in self.parameter_constraints() if one.name in parameters),
            split,
            (*_constraints_on_outputs(self, gm, inputs, outputs, recipes, placed), *whole),
            self.split_when_padded,
            tuple((name, layout) for name, layout in self.stored.items() if name in parameters),
        )

    def _of_these(self, given: Placements | None, names: Iterable[str]) -> Placements | None:
        """Return the constraints that a later call can honour: it may return other values than the first."""
        if given is None or not self.is_later:
            return given
        return {pattern: axes for pattern, axes in given.items() if any(fnmatch.fnmatchcase(name, pattern) for name in names)}

    def resharding(self, recipes: Recipes) -> Recipes:
        """Return `recipes` adapted to `Options(reshard_after_forward=...)`: each that differs is replaced by its
        variant.
        """
        keeps = self.options.keeps_gathered
        return recipes if keeps is None else freeing(recipes, frees_gathered=not keeps)

    def _batch(self, inputs: Mapping[str, torch.Size]) -> tuple[Constraint, ...]:
        """Return constraints for inputs as the caller splits them: by batch if dim 0 is the batch size, else whole.

        A batch that its axes do not divide is whole on them, also where recipes split it. Constraints in the options
        take precedence.
        """
        _, first = first_batch(inputs)
        axes = () if self.split_when_padded else _dividing(self.batch_axes or (), self.mesh, first)
        given = self.padded_axes if self.batch_axes is None else self.given_axes
        split = {name for name, shape in inputs.items() if shape and shape[0] == first}
        constrained = {(one.name, one.axis) for one in constraints_on(_input_placements(self), "inputs", inputs, self.mesh)}
        return tuple(
            Constraint(name, self.mesh.names[axis], Shard(0) if name in split and axis in axes else R)
            for name in inputs
            for axis in given
            if (name, self.mesh.names[axis]) not in constrained
        )

    @property
    def given_axes(self) -> tuple[int, ...]:
        """Return the axes over which the caller splits the batch, or nothing: all but those for the sequence, which a plan
        decides.
        """
        return tuple(axis for axis, name in enumerate(self.mesh.names) if name not in CONTEXT_AXES)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """Return the remarks of capture, and those for outputs that may be parts and a batch that the axes do not divide."""
        inputs = self.captured.shapes(InputRole.INPUT)
        found = (*self.captured.call.remarks, *_unknown_rows(self))
        name, batch = first_batch(inputs)
        if self.is_later or self.batch_axes is None:
            names = [self.mesh.names[axis] for axis in self.padded_axes]
        else:
            whole = (self.batch_axes or ())[len(_dividing(self.batch_axes or (), self.mesh, batch)) :]
            constrained = _placements_of(self, name)
            names = [self.mesh.names[axis] for axis in whole if self.mesh.names[axis] not in constrained]
        if not names or is_gain(batch, math.prod(self.mesh.sizes[axis] for axis in self.split_when_padded)):
            return found
        text = f"a batch of {batch} is not split over {' and '.join(names)}: every rank there computes all of it"
        return *found, Remark(Seed.name, text, Origin(), name.replace(".", "_"))

    def parameter_constraints(self) -> tuple[Constraint, ...]:
        """Return the user's constraints on parameters of the whole model, by their names in the graph.

        Raises ConstraintError if two names of one parameter are given different placements.
        """
        shapes, tied = self.captured.shapes(InputRole.PARAMETER), self.captured.tied
        names = shapes | {alias: shapes[name] for alias, name in tied.items()}
        found: dict[tuple[str, str], Constraint] = {}
        for one in constraints_on(self.options.params, "params", names, self.mesh):
            other = found.setdefault((tied.get(one.name, one.name), one.axis), one)
            if other.placement != one.placement:
                raise ConstraintError(
                    f"Options(params=...): {other.name!r} and {one.name!r} are one parameter, which cannot be both "
                    f"{other.placement} and {one.placement} on axis {one.axis!r}; give it one placement"
                )
        return tuple(Constraint(name, axis, one.placement) for (name, axis), one in found.items())

    @property
    def hiding(self) -> Hiding:
        """Return how messages are hidden, as the search counts them."""
        overlap = self.options.hiding
        if overlap is None:
            return Hiding(0, 0, overlaps=False, in_chunks=False)
        _, least, most = sizes(overlap.bucket_bytes)
        return Hiding(least, most, in_chunks=overlap.split_matmuls)


def given_recipes(options: Options, mesh: Mesh) -> Recipes | None:
    """Return the recipe of each axis; None if layouts are searched for."""
    is_searched = options.recipe == AUTO and options.passes is None and mesh.hardware is not None
    return None if is_searched else recipes_of(options.recipe, mesh)


def data_axes(recipes: Recipes) -> tuple[int, ...]:
    """Return the axes that split the batch."""
    return tuple(axis for axis, name in enumerate(recipes) if name is not None and recipe_named(name).carries_batch)


def freeing(recipes: Recipes, *, frees_gathered: bool) -> Recipes:
    """Return `recipes` in the variants that free gathered parameters after the forward, or keep them."""
    return tuple(
        None if name is None else with_frees(recipe_named(name), frees_gathered=frees_gathered).name for name in recipes
    )


def first_batch(inputs: Mapping[str, torch.Size]) -> tuple[str, int]:
    """Return the first input that has dims, and the length of its dim 0; an empty name and 0 if none has."""
    return next(((name, shape[0]) for name, shape in inputs.items() if shape), ("", 0))


def _dividing(axes: tuple[int, ...], mesh: Mesh, batch: int) -> tuple[int, ...]:
    """Return the longest prefix of `axes` that divides a batch of this size."""
    while axes and batch % math.prod(mesh.sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _constraints_on_outputs(
    problem: Problem,
    gm: GraphModule,
    inputs: Mapping[str, torch.Size],
    outputs: Mapping[str, torch.Size],
    recipes: Recipes,
    placed: _Placed,
) -> Iterator[Constraint]:
    """Yield the user's constraints; other outputs are the caller's part where that does not follow from the graph."""
    given = constraints_on(problem._of_these(problem.options.outputs, outputs), "outputs", outputs, problem.mesh)
    yield from given
    constrained = {(one.name, one.axis) for one in given}
    if not any(recipes) and given_recipes(problem.options, problem.mesh) is None:
        found = _in_a_search(problem, outputs)
    else:
        of = problem, inputs, outputs, recipes, placed
        found = (*_rows_of_the_batch(*of), *_as_the_input(gm, *of))
    yield from (one for one in found if (one.name, one.axis) not in constrained)


def _in_a_search(problem: Problem, outputs: Mapping[str, torch.Size]) -> tuple[Constraint, ...]:
    """Return that outputs with as many rows as the batch by chance are whole: a search splits those whose sizes agree."""
    whole = [name for name, grows in problem.captured.batch_outputs.items() if not grows and name in outputs]
    return tuple(Constraint(name, axis, R) for name in whole for axis in problem.mesh.names)


def _unknown_rows(problem: Problem) -> Iterator[Remark]:
    """Yield a remark for each output that has as many rows as the batch, which may be by chance."""
    constrained = problem._of_these(problem.options.outputs, problem.captured.batch_outputs) or {}
    for name, grows in problem.captured.batch_outputs.items():
        if grows is None and not any(fnmatch.fnmatchcase(name, pattern) for pattern in constrained):
            text = (
                f"output {name!r} has as many rows as the batch and reads no input; the model takes no batch of twice the "
                "size, which would tell whether it has a row for each sample: every rank gets all of it; if it has, say so with "
                f"Options(outputs={{{name!r}: {{axis: 'S(0)'}}}})"
            )
            yield Remark(Seed.name, text, Origin(), name.replace(".", "_"))


def _rows_of_the_batch(
    problem: Problem, inputs: Mapping[str, torch.Size], outputs: Mapping[str, torch.Size], recipes: Recipes, placed: _Placed
) -> Iterator[Constraint]:
    """Yield that outputs with the rows of the batch are split by rows over the axes that split it.

    Noise follows from no input that says so. A matrix of all pairs of two batches, transposed, would be split by columns.
    """
    _, batch = first_batch(inputs)
    axes = data_axes(recipes) if problem.batch_axes is None else problem.batch_axes
    axes = () if problem.split_when_padded else _dividing(axes, problem.mesh, batch)
    known = problem.captured.batch_outputs  # of a call that was traced; in one of other sizes, rows may be those of another input
    rows = [name for name, shape in outputs.items() if known.get(name) and shape[:1] == (batch,)]
    for axis in (problem.mesh.names[axis] for axis in axes if problem.mesh.sizes[axis] > 1):
        placement = placed.get(axis, Shard(0))
        if isinstance(placement, Shard) and placement.dim == 0:
            yield from (Constraint(name, axis, placement) for name in rows)


def _as_the_input(
    gm: GraphModule,
    problem: Problem,
    inputs: Mapping[str, torch.Size],
    outputs: Mapping[str, torch.Size],
    recipes: Recipes,
    placed: _Placed,
) -> Iterator[Constraint]:
    """Yield that computed outputs are split as the first input, on axes that the caller splits it over but whose recipe does not;
    outputs that have neither its dims nor its sizes, or have these by chance, are whole.

    Such a recipe (`megatron`) would return parts of another kind.
    """
    pairs = zip(problem.mesh.names, recipes, strict=True)
    placements = [(axis, placed.get(axis, R)) for axis, recipe in pairs if _ignores_inputs(recipe)]
    parts = [(axis, placement) for axis, placement in placements if isinstance(placement, Shard)]
    places = output_dims(gm) if parts else {}
    first = inputs[first_batch(inputs)[0]] if parts else ()
    for name, shape in outputs.items():
        follows = problem.captured.batch_outputs.get(name, True)
        for axis, placement in parts if shape else ():
            found = followed(placement, first, shape, places.get(name, {})) if follows else None
            yield Constraint(name, axis, found or R)


def _ignores_inputs(recipe: str | None) -> bool:
    return recipe is not None and not (recipe_named(recipe).carries_batch or recipe_named(recipe).carries_sequence)


def _placements_of(problem: Problem, name: str) -> dict[str, Placement]:
    """Return the user's placement of an input by axis."""
    found = constraints_on(_input_placements(problem), "inputs", problem.captured.shapes(InputRole.INPUT), problem.mesh)
    return {one.axis: one.placement for one in found if one.name == name}


def padding_as_given(problem: Problem) -> Problem:
    """Return the problem with its batch padded, if it is not divided by the axes that the caller splits it over, or else a given
    recipe or the names of the axes; and dims for the axes that a recipe shards products over, or that are not named for data.
    """
    recipes = given_recipes(problem.options, problem.mesh)
    if recipes is not None:
        return padded_for(problem, recipes)
    named = rule_of_thumb(problem.mesh)
    others = tuple(axis for axis, name in enumerate(named) if name != FSDP.name)
    return replace(padded_for(problem, named), compute_axes=others)


def padded_for(problem: Problem, recipes: Recipes) -> Problem:
    """Return the problem with its batch and dims padded as they are where these `recipes` are given."""
    axes = data_axes(recipes) if problem.batch_axes is None else problem.batch_axes
    return dims_padded_for(replace(problem, padded_axes=undivided(problem, axes)), recipes)


def dims_padded_for(problem: Problem, recipes: Recipes) -> Problem:
    """Return the problem with dims padded as they are where these `recipes` are given."""
    return replace(problem, compute_axes=compute_axes(recipes))


def dims_padded_as(problem: Problem, plan: PlanRecord) -> Problem:
    """Return the problem with dims padded as in a plan."""
    return replace(problem, pads=plan.pads, compute_axes=axes_named(problem.mesh, plan.compute_axes))


def padded_as(problem: Problem, plan: PlanRecord) -> Problem:
    """Return the problem with the batch and dims padded as in a plan."""
    return replace(dims_padded_as(problem, plan), padded_axes=axes_named(problem.mesh, plan.padded_axes))


def axes_named(mesh: Mesh, names: Iterable[str]) -> tuple[int, ...]:
    """Return the axes of `mesh` that have these names."""
    return tuple(mesh.names.index(name) for name in names if name in mesh.names)


def undivided(problem: Problem, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of more than one rank, if they do not divide the batch.

    The user may constrain the first input on some of them; there are none if that splits the batch.
    """
    axes = tuple(axis for axis in axes if problem.mesh.sizes[axis] > 1)
    name, batch = first_batch(problem.captured.shapes(InputRole.INPUT))
    if not problem.is_later:
        found = _placements_of(problem, name)
        is_split = any(isinstance(placement, Shard) and placement.dim == 0 for placement in found.values())
        axes = () if is_split else tuple(axis for axis in axes if problem.mesh.names[axis] not in found)
    return axes if batch % math.prod(problem.mesh.sizes[axis] for axis in axes) else ()


def _input_placements(problem: Problem) -> Placements:
    """Return the user's constraints on inputs, but for those of arguments that the call lacks: that are None in it or, in a later
    call, not there.
    """
    inputs = problem.captured.shapes(InputRole.INPUT)
    missing = [path for path, value in problem.captured.signature.constants if value is None]

    def is_missing(pattern: str) -> bool:
        starts = (".".join(pattern.split(".")[: path.count(".") + 1]) for path in missing)
        return problem.is_later or any(map(fnmatch.fnmatchcase, missing, starts))

    return {
        pattern: axes
        for pattern, axes in (problem.options.inputs or {}).items()
        if any(fnmatch.fnmatchcase(name, pattern) for name in inputs) or not is_missing(pattern)
    }


@uncollected()
def captured_problem(request: PlanRequest) -> Problem:
    """Capture the call. Raises UserErrors for what cannot be captured.

    The whole graph is traced on first use: to plan without running, a few of many equal layers are enough.
    """
    options = request.options
    policy = options.mixed_precision or MixedPrecisionPolicy()
    captured = capture_call(
        request.module,
        request.args,
        dict(request.kwargs),
        training=request.training,
        device=request.device,
        compute_dtype=policy.param_dtype,
        cast_inputs=policy.cast_forward_inputs,
        earlier=[one.captured for one in request.programs],
    )
    problem = Problem(
        captured,
        request.mesh,
        options,
        request.training,
        request.device,
        _cast(request, captured),
        request.stored or {},
        request.batch_axes,
        request.is_later,
        request.earlier,
    )
    return padding_as_given(problem)


def _cast(request: PlanRequest, captured: Captured) -> CastParameters:
    policy = request.options.mixed_precision
    if policy is None:
        return CastParameters()
    stored = tuple((name, p.dtype) for name, p in request.module.named_parameters() if p.is_floating_point())
    trained = {p.dtype for p in request.module.parameters() if p.is_floating_point() and p.requires_grad}
    for computed in {policy.param_dtype or dtype for dtype in trained}:
        _check_reduced(computed, policy.reduce_dtype or computed)
    given = captured.signature.flatten(request.args, dict(request.kwargs))
    inputs = tuple(
        (spec.path, tensor.dtype)
        for spec, tensor in zip(captured.signature.inputs, given, strict=True)
        if tensor.is_floating_point()
    )
    return CastParameters(stored, inputs, policy.reduce_dtype, policy.output_dtype)


def _check_reduced(computed: torch.dtype, reduced: torch.dtype) -> None:
    """Raise UserError if gradients are to be reduced in a dtype that is narrower than the one they are computed in."""
    if not keeps_sums(computed, reduced):
        held, wanted = (str(dtype).removeprefix("torch.") for dtype in (computed, reduced))
        raise UserError(
            f"Options(mixed_precision=...): gradients are computed in {held}, and {wanted} does not hold their sums; leave "
            f"reduce_dtype out, or compute in {wanted}: param_dtype=torch.{wanted}"
        )
