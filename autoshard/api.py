"""Public entry points: `autoshard` (a function and a class decorator) and `plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.capture_errors import check_module
from autoshard.capture.fake_module import check_parameters
from autoshard.config.options import Options, options_given
from autoshard.config.progress import say
from autoshard.config.progress import shown as shown_progress
from autoshard.config.settings import options_of, settings_of
from autoshard.config.topology import mesh_of
from autoshard.config.validation import check_call, shown
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from autoshard.runtime.calls.buckets import check_buckets
from autoshard.runtime.calls.programs import CallSettings
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.parameters import Place, place_of
from autoshard.runtime.process_groups import MeshGroups, open_groups
from autoshard.runtime.program_planner import ProgramPlanner
from autoshard.runtime.sharded_module import ShardedModule, shard_module
from autoshard.runtime.shared_memory import check_devices
from autoshard.runtime.shared_plan import Decided, given_plan, plan_together
from autoshard.runtime.watch.call_watch import SharedCall
from passes._torch import without_dispatch_modes
from passes.errors import MeshError, UserError
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
    check_buckets(options.buckets or {}, model)
    request = PlanRequest(model, tuple(args), kwargs or {}, mesh_of(mesh, options.hardware), options, training=training)
    title = f"planning {type(model).__name__} on {request.mesh}: capture, search, simulate"
    with shown_progress(title, enabled=options.progress) as progress:
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
    _check_unsharded(model)
    check_module(model)
    check_parameters(model)
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            f"autoshard runs on a DeviceMesh, not on {device_mesh!r}: use init_device_mesh(...); "
            "to plan without devices, call autoshard.plan"
        )
    place = place_of(device_mesh)
    limit = None if options is None else options.rank_timeout
    groups = open_groups(device_mesh, place.mesh, model=type(model).__name__, rank_timeout=limit)
    call = SharedCall("autoshard(...)", traits=_traits(args, kwargs, plan, options))
    gradients = torch.is_grad_enabled()
    with (
        torch.inference_mode(mode=False),
        torch.set_grad_enabled(gradients),  # what is made outlives the mode
        without_dispatch_modes(),
        groups.watch.call(call),
    ):
        return _distribute_together(model, device_mesh, place, groups, args, kwargs, plan, options)


def _check_unsharded(model: nn.Module) -> None:
    """Raise UserError for a model that `autoshard` returned, or that has one as a part."""
    for name, one in model.named_modules():
        if isinstance(one, ShardedModule):
            which = f"{name} of {type(model).__name__}" if name else "the model"
            raise UserError(
                f"{which} is sharded already: autoshard(...) returned it; use it as it is, or give the module that it was made "
                "from, after loading its full state dict"
            )


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
    check_buckets(options.buckets or {}, model)
    check_devices(options, device_mesh.device_type)
    planner = ProgramPlanner(device_mesh.device_type, place.mesh, options, given)
    shows = options.progress and groups.rank == groups.mesh.ranks[0]
    logged = place.mesh.size > 1
    settings = CallSettings(options.compile, options.max_programs, options.buckets or {}, shows, logged)
    if args is None and kwargs is None:
        later = "captured, planned and compiled at its first call; with args=..., now"
        say(f"{type(model).__name__} on {place.mesh}: {later}", enabled=shows, logged=logged)
        return shard_module(model, place, groups, planner, settings)

    def attempt(followed: Decided | None) -> LocalProgram:
        axes, call = planner.batch_axes(), (model, args or (), kwargs or {}, gradients)
        return planner.plan(*call, batch_axes=axes, followed=followed, progress=progress)

    started = time.perf_counter()
    gradients, title = torch.is_grad_enabled(), f"sharding {type(model).__name__} on {place.mesh}: capture, plan, compile"
    with shown_progress(title, enabled=shows, logged=f"{type(model).__name__}: program 1" if logged else "") as progress:
        planned = plan_together(groups, attempt)
        progress("compile")
        return shard_module(
            model, place, groups, planner, settings, planned=planned, gradients=gradients, started=started
        )


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
