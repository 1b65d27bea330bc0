"""The module that a user trains: an instance of their own class whose forward runs compiled programs on a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from autoshard.compile.compiled import Mode
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.runtime.agreement import Given, check_equal_values, differences, exchange, together
from autoshard.runtime.build import build_program
from autoshard.runtime.execution import Execution, LocalProgram, Slot, bind, parameter_slots
from autoshard.runtime.parameters import Place, distributed_copy, lay_out, plain_copy
from autoshard.runtime.process_groups import MeshGroups
from autoshard.runtime.profiling import Profile, profile
from autoshard.runtime.shared_plan import Decided, plan_together
from autoshard.runtime.watch.call_watch import SharedCall
from passes._torch import local_of_dtensor
from passes.errors import InputError, UserError
from passes.ir.layout import Layout, replicated

Key = tuple[bool, tuple[bool, ...], tuple[bool, ...]]


@dataclass(frozen=True)
class FirstCall:
    """The first call of a sharded module in a mode: the module as the user wrote it, and this rank's arguments."""

    module: nn.Module  # global shapes; parameters on meta
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool  # whether a backward is wanted
    parameters: Mapping[str, Layout] | None  # as stored since an earlier program; None: free to choose


Planner = Callable[[FirstCall, Decided | None], LocalProgram]  # called with the first rank's plan to follow


@dataclass(frozen=True)
class Suspect:
    """A parameter that was cut from different values on different ranks: an error, unless it is overwritten before the
    first step.
    """

    name: str
    parameter: torch.Tensor
    version: int
    problem: str

    def check(self, present: torch.Tensor) -> None:
        """Raise InputError if the parameter was not overwritten."""
        if present is self.parameter and present._version == self.version:
            raise InputError(self.problem)


@dataclass
class RuntimeState:
    """A sharded module's state apart from the user's attributes; calls change it."""

    kind: type[nn.Module]  # the user's class
    place: Place
    groups: MeshGroups
    planner: Planner
    mode: Mode
    seed: int  # equal on all ranks
    modules: tuple[nn.Module, ...]  # all modules of the model, itself first
    parameters: tuple[Slot, ...]
    step: int = 0
    layouts: Mapping[str, Layout] | None = None
    executions: dict[Key, Execution] = field(default_factory=dict)
    agreed: set[Key] = field(default_factory=set)  # programs whose first inputs were compared between ranks
    suspects: tuple[Suspect, ...] = ()


class ShardedModule(nn.Module):
    """A module on a mesh, as `autoshard(model, mesh)` returns it; also an instance of the user's class.

    A call takes this rank's part of each input, as a plain tensor, or a DTensor, and returns this rank's part of each
    output.
    """

    _autoshard: RuntimeState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for the module's present mode; the first call in a mode captures and compiles it.

        Raises InputError for a call that does not fit, or for replicated values that differ, and DistributedError if
        another rank failed.
        """
        state = self._autoshard
        key = _key(state)
        with state.groups.watch.call(_shared_call(state, key)):
            if key not in state.executions:
                _install(self, key, args, kwargs)
            execution = state.executions[key]
            if key not in state.agreed:
                _agree_on_inputs(state, execution, args, kwargs)
                state.agreed.add(key)
            state.step += 1
            return execution.run(args, kwargs, _seed(state), state.step)

    @property
    def plan(self) -> ShardingPlan:
        """Return the plan of the first program: for training, if the model was first called in that mode."""
        return self._first().local.plan

    def _first(self) -> Execution:
        execution = next(iter(self._autoshard.executions.values()), None)
        if execution is None:
            raise InputError("nothing was captured yet: give autoshard(..., args=...) or call the model once before")
        return execution

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of a global batch, given as the arguments of a call.

        Positional arguments come back as a tuple, keyword arguments as a dict, and both together as `(tuple, dict)`:

            loss = model(*model.shard(tokens, labels))
            loss = model(**model.shard(**batch))

        The arguments must fit one of the captured calls; if none fits, the first one's error is raised. Raises InputError for a
        call, or a batch, of another shape than captured, and before anything was captured.
        """
        positional, named = self._shard(args, kwargs)
        if not named:
            return positional
        return (positional, named) if positional else named

    def _shard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._first()
        problems: list[InputError] = []
        for execution in self._autoshard.executions.values():
            try:
                return execution.shard(args, kwargs)
            except InputError as error:
                problems.append(error)
        raise problems[0]

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Measure one call with this rank's part of a batch, and its backward, and compare them with the prediction.

        The profile has the times of the step, of each collective and of each module, and the hardware's figures that
        fit the measurements. Gradients, buffers and parameters are not changed. All ranks call it together.

        Raises InputError before anything was captured for the present mode; UserError if the hardware is unknown.
        """
        state = self._autoshard
        execution = state.executions.get(_key(state))
        if execution is None:
            raise InputError("nothing was captured for this mode yet: call the model once before")
        with state.groups.watch.call(SharedCall("profile")):
            return profile(execution, state.groups, args, kwargs, _seed(state))

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> DistributedSampler[Any]:
        """Return a sampler for a DataLoader: different samples on axes that split the batch, the same samples on
        others.

        The loader's batch size is this rank's part of the batch. Raises InputError before anything was captured.
        """
        execution = self._first()
        batched = [item.layout for item in execution.inputs if item.spec.shape]
        place, ways, part = execution.place, 1, 0
        for axis in batched[0].axes_on(0) if batched else ():
            ways *= place.mesh.sizes[axis]
            part = part * place.mesh.sizes[axis] + place.coordinate[axis]
        return DistributedSampler(dataset, ways, part, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UserError(
            "a sharded module cannot be copied: it holds process groups and compiled code; copy its state_dict(), "
            "or shard the module that it was made from again"
        )


def shard_module(
    module: nn.Module,
    place: Place,
    groups: MeshGroups,
    planner: Planner,
    *,
    mode: Mode,
    planned: LocalProgram | None = None,
    gradients: bool = True,
) -> ShardedModule:
    """Return a copy of `module` on the mesh of `place`; `module` is not changed. All ranks of the mesh call it
    together.

    A `planned` program, for the module's present mode and `gradients`, is compiled now, and parameters are stored as
    it says from the start. Without one, parameters are whole on every rank until the first call, which `planner`
    plans. Raises MeshError, CaptureError, and DistributedError if another rank fails.
    """
    layouts = None if planned is None else planned.parameters
    copied = together(groups, "copying the model", lambda: distributed_copy(module, place, layouts))
    seed = exchange(groups, torch.initial_seed())[0]
    suspects = () if layouts is None else _suspects(module, copied, groups)
    kind = type(module)
    copied.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    sharded = cast(ShardedModule, copied)
    sharded._autoshard = RuntimeState(
        kind,
        place,
        groups,
        planner,
        mode,
        seed,
        tuple(sharded.modules()),
        tuple(parameter_slots(sharded).values()),
        layouts=layouts,
        suspects=suspects,
    )
    if planned is not None:
        _, training, trainable = _key(sharded._autoshard)
        _build(sharded, (gradients, training, trainable), planned)
    return sharded


def as_written(model: ShardedModule) -> nn.Module:
    """Return the model as its user wrote it, in its present state, with parameters on meta and of global shape."""
    state, kind = model._autoshard, type(model)
    del model._autoshard
    model.__class__ = state.kind  # type: ignore[assignment]
    try:
        return plain_copy(model)
    finally:
        model.__class__ = kind
        model._autoshard = state


def _key(state: RuntimeState) -> Key:
    """Return what a program depends on besides its arguments."""
    return (
        torch.is_grad_enabled(),
        tuple(module.training for module in state.modules),
        tuple(slot.read().requires_grad for slot in state.parameters),
    )


def _shared_call(state: RuntimeState, key: Key) -> SharedCall:
    """Return the call of a module in its present mode, as all ranks have to make it."""
    note, traits = _described(key)
    return SharedCall(f"forward call {state.step + 1}", note, traits)


@lru_cache
def _described(key: Key) -> tuple[str, tuple[tuple[str, str], ...]]:
    gradients, training, trainable = key
    mode = "training" if all(training) else "part in training" if any(training) else "evaluation"
    flags = (("training of modules", training), ("requires_grad of parameters", trainable))
    return f"{mode}, {'with' if gradients else 'without'} gradients", tuple((name, _on(some)) for name, some in flags)


def _on(flags: tuple[bool, ...]) -> str:
    """Return "3 of 4 (4f2a)": how many are on, and a digest of which."""
    return f"{sum(flags)} of {len(flags)} ({hashlib.blake2b(bytes(flags), digest_size=2).hexdigest()})"


def _install(model: ShardedModule, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state = model._autoshard

    def plan(followed: Decided | None) -> LocalProgram:
        return state.planner(FirstCall(as_written(model), args, kwargs, key[0], state.layouts), followed)

    _build(model, key, plan_together(state.groups, plan))


def _build(model: ShardedModule, key: Key, local: LocalProgram) -> None:
    state = model._autoshard
    built = build_program(local, state.groups, mode=state.mode)
    state.groups = built.groups
    local = replace(local, plan=replace(local.plan, remarks=(*local.plan.remarks, *built.remarks)))
    if state.layouts is None:
        _agree_on_parameters(model)
        lay_out(model, state.place, local.parameters)
        state.layouts = local.parameters
    state.executions[key] = bind(built.program, local, model, state.place, state.groups.watch)


def _suspects(module: nn.Module, copied: nn.Module, groups: MeshGroups) -> tuple[Suspect, ...]:
    """Return the parameters that differ between ranks: no error yet, as a checkpoint may be loaded before the first
    call.
    """
    named = [(name, p) for name, p in module.named_parameters() if not p.is_meta]
    whole = replicated(groups.mesh)
    problems = differences(groups, [Given(f"parameter {name!r}", _ONE_MODEL, whole, p) for name, p in named])
    made = {name: copied.get_parameter(name) for name, _ in named}
    return tuple(
        Suspect(name, made[name], made[name]._version, problems[number])
        for number, (name, _) in enumerate(named)
        if number in problems
    )


def _agree_on_parameters(model: ShardedModule) -> None:
    """Check that whole parameters are equal before they are cut: ranks with different seeds would mix different
    models.
    """
    state = model._autoshard
    whole = replicated(state.place.mesh)
    given = [
        Given(f"parameter {name!r}", _ONE_MODEL, whole, local_of_dtensor(parameter))
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and not parameter.is_meta
    ]
    given += [Given(f"buffer {name!r}", _ONE_MODEL, whole, b) for name, b in model.named_buffers() if not b.is_meta]
    check_equal_values(state.groups, given)


_ONE_MODEL = "build the model with the same seed on every rank, or load the same state_dict"


def _agree_on_inputs(state: RuntimeState, execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the inputs of the first step: valid on every rank, and equal where they are replicated."""

    def check() -> None:
        execution.check_inputs(args, kwargs)
        for suspect in state.suspects:
            suspect.check(execution.parameters[suspect.name].slot.read())

    together(state.groups, "the first call", check)
    taken = execution.take_inputs(args, kwargs)
    advice = "give ranks that differ only on this axis the same batch, as model.sampler(...) does"
    given = [
        Given(f"input {item.spec.path!r}", advice, item.layout, tensor)
        for item, tensor in zip(execution.inputs, taken, strict=True)
    ]
    check_equal_values(state.groups, given)


def _seed(state: RuntimeState) -> torch.Tensor:
    # Steps must not share random numbers, nor must runs with neighbouring seeds: spread them (golden ratio).
    value = (state.seed * 0x9E3779B97F4A7C15 + state.step) % (1 << 63)
    return torch.tensor(value, dtype=torch.int64, device=state.place.device)
