"""Plan the programs of a sharded module, around one layout of its parameters and one split of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.compile.overlap import OverlapPhase
from autoshard.config.axis_names import batch_axes_of
from autoshard.config.axis_recipes import AUTO, recipes_of
from autoshard.config.constraints import check_options
from autoshard.config.options import Options
from autoshard.config.progress import Progress, silent
from autoshard.dumps.graph_dump import dump_of
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.make_plan import Planned, make_plan
from autoshard.planner.problem import axes_named, data_axes
from autoshard.planner.request import EarlierProgram, PlanRequest
from autoshard.plans.compatibility import check_asked
from autoshard.plans.record import PlanRecord
from autoshard.runtime.call_errors import with_cause
from autoshard.runtime.calls.programs import FirstCall
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.global_call import Splits, global_call, layouts_of_call
from autoshard.runtime.output_gradients import OutputGradients
from autoshard.runtime.shared_plan import Decided
from passes.errors import CaptureError
from passes.ir.layout import Layout, R, next_digit
from passes.ir.mesh import Mesh
from passes.recipes import recipe_named

KEPT = 4  # programs of all layers that are kept, to make those of other sizes from: of modes and of ways to call


class ProgramPlanner:
    """Planner of a sharded module's programs, one for each mode that it is called in; `given` is the user's plan for
    one mode.
    """

    def __init__(self, device: str, mesh: Mesh, options: Options, given: ShardingPlan | None) -> None:
        if given is not None:
            check_asked(given, mesh, options)  # first: options of a plan for another mesh need not work on this one
        check_options(options, mesh)
        if given is None and options.recipe == AUTO:
            batch_axes_of(options, mesh)  # raise now rather than at the first call
        self.device, self.mesh, self.options, self.given = device, mesh, options, given
        self.awaits = given is not None  # `given` has not been compiled yet
        self.first: PlanRecord | None = given  # the plan that decides how inputs are split
        self.made: list[PlanRecord] = []
        self.programs: list[EarlierProgram] = []  # that were traced with all layers

    def __call__(self, call: FirstCall, followed: Decided | None) -> LocalProgram:
        """Return the program for a call with this rank's part of each input."""
        splits = self.splits()
        args, kwargs = global_call(call.module, call.args, call.kwargs, splits)
        layouts = layouts_of_call(call.module, args, kwargs, splits) if self.made else None
        try:
            return self.plan(
                call.module,
                args,
                kwargs,
                call.gradients,
                call.parameters,
                batch_axes=splits.data_axes if self.made else self.batch_axes(),
                layouts=layouts,
                followed=followed,
                progress=call.progress,
            )
        except CaptureError as error:
            known = {} if self.first is None else self.first.parameters
            explained = with_cause(error, call, splits, known, device=self.device, options=self.options)
            if explained is error:
                raise
            raise explained from error

    def plan(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        training: bool,
        stored: Mapping[str, Layout] | None = None,
        *,
        batch_axes: tuple[int, ...] | None = None,
        layouts: Mapping[str, Layout] | None = None,
        followed: Decided | None,
        progress: Progress = silent,
    ) -> LocalProgram:
        """Return the program for a call with global inputs.

        `batch_axes` are the axes that the caller splits the batch over, `layouts` those of the inputs as the caller
        gives them (None: as the plan says). `followed` waits for the plan that the first rank decided on.
        """
        given = self.given if self.awaits and self.given and self.given.settings.training == training else None
        if stored is None and given is None and self.given is not None:
            stored = {name: value.layout for name, value in self.given.parameters.items()}
        request = PlanRequest(
            module,
            args,
            kwargs,
            self.mesh,
            self.options if layouts is None else self._options_with(layouts),
            training=training,
            device=self.device,
            stored=stored,
            batch_axes=batch_axes,
            is_later=layouts is not None,
            earlier=tuple(self.made) or (() if self.given is None else (self.given,)),
            programs=tuple(self.programs),
        )
        planned = make_plan(request, plan=followed or given, progress=progress)
        self.awaits = self.awaits and given is None
        self.first = self.first or planned.plan
        self.made.append(planned.plan)
        if planned.captured.known is None:
            made = EarlierProgram(planned.captured, planned.graph, planned.plan)
            self.programs = [*self.programs, made][-KEPT:]
        return _local_program(planned, self.options, self._split_axes(self.first))

    def _options_with(self, layouts: Mapping[str, Layout]) -> Options:
        """Return the options for a call whose inputs have these layouts."""
        return replace(self.options, inputs={path: _placements(layout, self.mesh) for path, layout in layouts.items()})

    def batch_axes(self) -> tuple[int, ...] | None:
        """Return the axes that the caller splits the batch over; None: as the recipe says.

        A search does not choose how the caller splits the batch: until there is a plan, the names of the axes decide. A given
        plan says which axes it was made for.
        """
        if self.options.recipe != AUTO:
            return None
        if self.given is None:
            return self.splits().data_axes
        return None if self.given.batch_axes is None else axes_named(self.mesh, self.given.batch_axes)

    def splits(self) -> Splits:
        """Return how a call's inputs are split: as in the first plan, or before that, over the axes of data-parallel
        recipes. Inputs that the first call lacked are split as the options say.
        """
        if self.first is None:
            return Splits(self.mesh, self._data_axes(), self.options.inputs, self._sequence_axes(), is_planned=False)
        layouts = {name: value.layout for name, value in self.first.inputs.items() if value.shape}
        if self.first.padded_axes:
            layouts = self._split_when_it_divides(self.first)
        placements = {name: _placements(layout, self.mesh) for name, layout in layouts.items()}
        first = next(iter(layouts.values()), None)
        missing = {name: axes for name, axes in (self.options.inputs or {}).items() if name not in placements}
        return Splits(self.mesh, () if first is None else first.axes_on(0), placements | missing)

    def _split_when_it_divides(self, plan: PlanRecord) -> dict[str, Layout]:
        """Return the layouts of inputs, for a batch that the axes divide, of a plan whose batch they do not divide."""
        inputs = {name: value for name, value in plan.inputs.items() if value.shape}
        batch = next(value.shape[0] for value in inputs.values())
        layouts = {name: value.layout for name, value in inputs.items()}
        for axis in map(self.mesh.index, plan.padded_axes):
            for name, value in inputs.items():
                if value.shape[0] == batch and layouts[name].on(axis) == R:
                    layouts[name] = layouts[name].with_on(axis, next_digit(layouts[name], 0, self.mesh))
        return layouts

    def _split_axes(self, first: PlanRecord) -> set[int]:
        """Return the axes that split an input, by batch or otherwise, when they divide it."""
        layouts = [value.layout for value in first.inputs.values() if value.shape]
        split = {axis for layout in layouts for axis in range(self.mesh.ndim) if layout.on(axis) != R}
        return split | set(self.splits().data_axes)

    def _data_axes(self) -> tuple[int, ...]:
        if self.options.recipe == AUTO:
            return batch_axes_of(self.options, self.mesh)
        return data_axes(recipes_of(self.options.recipe, self.mesh))

    def _sequence_axes(self) -> tuple[str, ...]:
        """Return the axes whose recipe finds in the model which dims of inputs are positions, and splits these."""
        axes = zip(self.mesh.names, self.mesh.sizes, recipes_of(self.options.recipe, self.mesh), strict=True)
        return tuple(axis for axis, size, one in axes if size > 1 and one is not None and recipe_named(one).carries_sequence)


def _placements(layout: Layout, mesh: Mesh) -> dict[str, str]:
    return dict(zip(mesh.names, map(str, layout.placements), strict=True))


def _local_program(planned: Planned, options: Options, split_axes: Collection[int]) -> LocalProgram:
    signature, plan = planned.captured.signature, ShardingPlan.of(planned.plan)
    parameters = {name: value.layout for name, value in plan.parameters.items()}
    inputs = tuple(plan.inputs[spec.path].layout for spec in signature.inputs)
    outputs = tuple(plan.outputs[name].layout for name in signature.outputs)
    return LocalProgram(
        graph=planned.graph,
        signature=signature,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters | {alias: parameters[name] for alias, name in planned.captured.tied.items()},
        constants=planned.captured.constants,
        output_gradients=OutputGradients.of(plan.mesh, inputs, outputs, sums=options.loss == "sum"),
        whole_outputs=frozenset(number for number, layout in enumerate(outputs) if _is_whole(layout, plan.mesh, split_axes)),
        plan=plan,
        dump=dump_of(options),
        overlap=OverlapPhase.of(options, plan.mesh),
        names=planned.captured.names,
        outside=planned.captured.outside,
        new_values=planned.captured.call.new_values,
    )


def _is_whole(layout: Layout, mesh: Mesh, split_axes: Collection[int]) -> bool:
    """Return whether an output is whole on every rank where `split_axes` split inputs."""
    split = [size > 1 and placement != R for size, placement in zip(mesh.sizes, layout.placements, strict=True)]
    return not any(split) and any(mesh.sizes[axis] > 1 for axis in split_axes)
