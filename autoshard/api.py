"""Public entry points: `autoshard` (a function and a class decorator) and `plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.compile.overlap import OverlapPhase
from autoshard.config.axis_names import batch_axes_of
from autoshard.config.axis_recipes import AUTO, recipes_of
from autoshard.config.constraints import check_options
from autoshard.config.options import Options, options_given
from autoshard.config.progress import Progress, silent
from autoshard.config.progress import shown as shown_on_terminal
from autoshard.config.settings import options_of, settings_of
from autoshard.config.topology import mesh_of
from autoshard.config.validation import check_call, shown
from autoshard.dumps.graph_dump import dump_of
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.make_plan import Planned, make_plan, plan_ahead
from autoshard.planner.problem import data_axes
from autoshard.planner.request import PlanRequest
from autoshard.plans.compatibility import check_asked
from autoshard.plans.record import PlanRecord
from autoshard.runtime.calls.programs import CallSettings, FirstCall
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.global_call import Splits, global_call, layouts_of_call
from autoshard.runtime.parameters import Place, place_of
from autoshard.runtime.process_groups import MeshGroups, open_groups
from autoshard.runtime.sharded_module import ShardedModule, shard_module
from autoshard.runtime.shared_memory import check_devices
from autoshard.runtime.shared_plan import Decided, given_plan, plan_together
from autoshard.runtime.watch.call_watch import SharedCall
from passes.errors import MeshError, UserError
from passes.ir.layout import Layout, Shard
from passes.ir.mesh import Mesh

Model = TypeVar("Model", bound=nn.Module)
ModelClass = TypeVar("ModelClass", bound=type[nn.Module])


def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
) -> ShardingPlan:
    """Plan how `model` is distributed on `mesh`, without running it and without processes or devices.

    `args` and `kwargs` are the arguments of one call with the global batch; they, and the model's parameters, may be
    on meta. The plan is for training if gradients are enabled and any output needs one. Raises a UserError that says
    what to change if the model, mesh or options cannot work.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"autoshard.plan takes an nn.Module, not {type(model).__name__}")
    check_call(args, kwargs)
    options, training = options_given(options), torch.is_grad_enabled()
    request = PlanRequest(model, tuple(args), kwargs or {}, mesh_of(mesh, options.hardware), options, training=training)
    title = f"planning {type(model).__name__} on {request.mesh}: capture, search, simulate"
    with shown_on_terminal(title, enabled=options.progress) as progress:
        return ShardingPlan.of(*plan_ahead(request, progress=progress))


@overload
def autoshard(
    model: nn.Module,
    mesh: DeviceMesh,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | str | PathLike[str] | None = None,
    options: Options | None = None,
) -> ShardedModule: ...


@overload
def autoshard(
    model: None = None,
    mesh: DeviceMesh | None = None,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | str | PathLike[str] | None = None,
    options: Options | None = None,
) -> Callable[[ModelClass], ModelClass]: ...


def autoshard(
    model: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | str | PathLike[str] | None = None,
    options: Options | None = None,
) -> ShardedModule | Callable[[ModelClass], ModelClass]:
    """Distribute `model`, written for one device, on `mesh`; all ranks of the mesh must call it together.

    Returns a module of the user's class (also a `ShardedModule`) whose parameters are DTensors; `model` itself is not
    changed. A call takes this rank's part of each input and returns this rank's part of each output; a scalar loss is
    the loss of the global batch, and gradients equal those on one device.

    `args` and `kwargs` are the arguments of one call with the global batch. If they are given, the model is captured
    and compiled now, otherwise at its first call. Without `model`, returns a class decorator.

    `plan` is a plan to run, or the path of a saved one; if no options are given, the options it was made with apply.
    The first rank's plan counts. A call in another mode than the plan's (evaluation, say) gets a plan of its own that
    keeps the layouts of the parameters.

    Raises a UserError that says what to change if the model, mesh, options or arguments cannot work.
    """
    if mesh is None:
        raise MeshError("autoshard needs a mesh: autoshard(model, mesh), or @autoshard(mesh=mesh) on a class")
    check_call(args, kwargs)
    args = None if args is None else tuple(args)
    options = None if options is None else options_given(options)
    if model is None:
        return _decorator(mesh, args, kwargs, plan, options)
    return _distribute(model, mesh, args, kwargs, plan, options)


def _distribute(
    model: nn.Module,
    device_mesh: DeviceMesh,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
    plan: ShardingPlan | str | PathLike[str] | None,
    options: Options | None,
) -> ShardedModule:
    if not isinstance(model, nn.Module):
        raise UserError(f"autoshard takes an nn.Module, not {type(model).__name__}")
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            f"autoshard runs on a DeviceMesh, not on {device_mesh!r}: use init_device_mesh(...); "
            "to plan without devices, call autoshard.plan"
        )
    place = place_of(device_mesh)
    limit = None if options is None else options.rank_timeout
    groups = open_groups(device_mesh, place.mesh, model=type(model).__name__, rank_timeout=limit)
    with groups.watch.call(SharedCall("autoshard(...)", traits=_traits(args, kwargs, plan, options))):
        return _distribute_together(model, device_mesh, place, groups, args, kwargs, plan, options)


def _traits(
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
    plan: ShardingPlan | str | PathLike[str] | None,
    options: Options | None,
) -> tuple[tuple[str, str], ...]:
    """Return what has to be equal on all ranks before a module can be distributed: above all the options."""
    given = {
        "arguments": "none" if args is None and kwargs is None else "given",
        "a plan": "none" if plan is None else "given",
        "gradients": "enabled" if torch.is_grad_enabled() else "disabled",
    }
    if options is not None or plan is None:
        options = options or Options()
        settings = settings_of(options, training=torch.is_grad_enabled(), device="").options
        given |= {name: shown(value) for name, value in settings.items()}
        given |= {"compile": repr(options.compile), "buckets": shown(options.buckets)}
    return tuple(given.items())


def _distribute_together(
    model: nn.Module,
    device_mesh: DeviceMesh,
    place: Place,
    groups: MeshGroups,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
    plan: ShardingPlan | str | PathLike[str] | None,
    options: Options | None,
) -> ShardedModule:
    given = None if plan is None else given_plan(groups, plan)
    options = options or (Options() if given is None else options_of(given.settings))
    check_devices(options, device_mesh.device_type)
    planner = _Planner(device_mesh.device_type, place.mesh, options, given)
    shows = options.progress and groups.rank == groups.mesh.ranks[0]
    settings = CallSettings(options.compile, options.max_programs, options.buckets or {}, shows)
    if args is None and kwargs is None:
        return shard_module(model, place, groups, planner, settings)

    def attempt(followed: Decided | None) -> LocalProgram:
        axes, call = planner.batch_axes(), (model, args or (), kwargs or {}, gradients)
        return planner.plan(*call, batch_axes=axes, followed=followed, progress=progress)

    gradients, title = torch.is_grad_enabled(), f"sharding {type(model).__name__} on {place.mesh}: capture, plan, compile"
    with shown_on_terminal(title, enabled=shows) as progress:
        planned = plan_together(groups, attempt)
        progress("compile")
        return shard_module(model, place, groups, planner, settings, planned=planned, gradients=gradients)


class _Planner:
    """Planner of a sharded module's programs, one for each mode that it is called in; `given` is the user's plan for
    one mode.
    """

    def __init__(self, device: str, mesh: Mesh, options: Options, given: ShardingPlan | None) -> None:
        check_options(options, mesh)
        if given is not None:
            check_asked(given, mesh, options)
        elif options.recipe == AUTO:
            batch_axes_of(options, mesh)  # raise now rather than at the first call
        self.device, self.mesh, self.options, self.given = device, mesh, options, given
        self.awaits = given is not None  # `given` has not been compiled yet
        self.first: PlanRecord | None = given  # the plan that decides how inputs are split
        self.made: list[PlanRecord] = []

    def __call__(self, call: FirstCall, followed: Decided | None) -> LocalProgram:
        """Return the program for a call with this rank's part of each input."""
        splits = self.splits()
        args, kwargs = global_call(call.module, call.args, call.kwargs, splits)
        layouts = layouts_of_call(call.module, args, kwargs, splits) if self.made else None
        return self.plan(
            call.module,
            args,
            kwargs,
            call.gradients,
            call.parameters,
            batch_axes=None if self.made else self.batch_axes(),
            layouts=layouts,
            followed=followed,
            progress=call.progress,
        )

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
        )
        planned = make_plan(request, plan=followed or given, progress=progress)
        self.awaits = self.awaits and given is None
        self.first = self.first or planned.plan
        self.made.append(planned.plan)
        return self._program(planned)

    def _options_with(self, layouts: Mapping[str, Layout]) -> Options:
        """Return the options for a call whose inputs have these layouts."""
        return replace(self.options, inputs={path: self._placements(layout) for path, layout in layouts.items()})

    def _placements(self, layout: Layout) -> dict[str, str]:
        return dict(zip(self.mesh.names, map(str, layout.placements), strict=True))

    def batch_axes(self) -> tuple[int, ...] | None:
        """Return the axes that the caller splits the batch over; None: as the recipe or the given plan says.

        A search does not choose how the caller splits the batch: until there is a plan, the names of the axes decide.
        """
        return self.splits().data_axes if self.options.recipe == AUTO and self.given is None else None

    def splits(self) -> Splits:
        """Return how a call's inputs are split: as in the first plan, or before that, over the axes of data-parallel
        recipes.
        """
        if self.first is None:
            return Splits(self.mesh, self._data_axes(), self.options.inputs)
        layouts = {name: value.layout for name, value in self.first.inputs.items() if value.shape}
        placements = {name: self._placements(layout) for name, layout in layouts.items()}
        first = next(iter(layouts.values()), None)
        return Splits(self.mesh, () if first is None else first.axes_on(0), placements)

    def _data_axes(self) -> tuple[int, ...]:
        if self.options.recipe == AUTO:
            return batch_axes_of(self.options, self.mesh)
        return data_axes(recipes_of(self.options.recipe, self.mesh))

    def _program(self, planned: Planned) -> LocalProgram:
        signature, plan = planned.captured.signature, ShardingPlan.of(planned.plan)
        parameters = {name: value.layout for name, value in plan.parameters.items()}
        outputs = tuple(plan.outputs[name].layout for name in signature.outputs)
        return LocalProgram(
            graph=planned.graph,
            signature=signature,
            inputs=tuple(plan.inputs[spec.path].layout for spec in signature.inputs),
            outputs=outputs,
            parameters=parameters | {alias: parameters[name] for alias, name in planned.captured.tied.items()},
            constants=planned.captured.constants,
            tangent_scale=tuple(self._scale(layout) for layout in outputs),
            plan=plan,
            dump=dump_of(self.options),
            overlap=OverlapPhase.of(self.options, plan.mesh),
            names=planned.captured.names,
            new_values=planned.captured.call.new_values,
        )

    def _scale(self, layout: Layout) -> float:
        """Return the factor for the gradient of this rank's loss: one over the number of parts, or 1 if the losses are
        summed.
        """
        if self.options.loss == "sum":
            return 1.0
        pairs = zip(self.mesh.sizes, layout.placements, strict=True)
        return 1.0 / math.prod(size for size, placement in pairs if isinstance(placement, Shard))


def _decorator(
    mesh: DeviceMesh,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
    plan: ShardingPlan | str | PathLike[str] | None,
    options: Options | None,
) -> Callable[[ModelClass], ModelClass]:
    def decorate(kind: ModelClass) -> ModelClass:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UserError(f"@autoshard(mesh=...) decorates an nn.Module class, not {kind!r}")
        meta = type(kind)

        class Distributing(meta):  # type: ignore[misc, valid-type]
            """Metaclass that distributes each instance of the class when it is created."""

            def __call__(cls, *made_of: Any, **named: Any) -> Any:
                return _distribute(super().__call__(*made_of, **named), mesh, args, kwargs, plan, options)

        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        decorated: ModelClass = Distributing(kind.__name__, (kind,), body)
        return decorated

    return decorate
