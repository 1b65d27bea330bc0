"""The module that a user trains: an instance of their own class whose forward runs compiled programs on a mesh."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.runtime.agreement import Given, compare, exchange, together
from autoshard.runtime.calls.alone import allow_alone, refuse_alone
from autoshard.runtime.calls.drawing import draw_whole
from autoshard.runtime.calls.global_batch import parts_of
from autoshard.runtime.calls.loaded_states import take_loaded_states
from autoshard.runtime.calls.optimizer_numbers import follow_optimizers
from autoshard.runtime.calls.original_parameters import remember_originals
from autoshard.runtime.calls.other_parameters import compare_other_parameters
from autoshard.runtime.calls.programs import (
    ONE_MODEL,
    CallSettings,
    Planner,
    Program,
    RuntimeState,
    Suspect,
    find_program,
    format_planned,
    install,
    program_of,
    shared_call,
)
from autoshard.runtime.calls.random_stream import RandomStream, origin_of
from autoshard.runtime.calls.refused_modes import COMPILED, Refusals, check_modes
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.parameters import Place, distributed_copy, plain_copy, whole_copy
from autoshard.runtime.process_groups import MeshGroups
from autoshard.runtime.profiling import Profile, profile
from autoshard.runtime.watch.call_watch import SharedCall
from autoshard.runtime.whole_tensor import WholeTensor
from passes._torch import allow_in_compiled_code
from passes.errors import InputError
from passes.ir.layout import replicated


class ShardedModule(Refusals):
    """A module on a mesh, as `autoshard(model, mesh)` returns it; also an instance of the user's class.

    A call takes this rank's part of each input, as a plain tensor, or a DTensor, and returns this rank's part of each
    output.
    """

    _autoshard: RuntimeState

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for this call, as `forward` does; hooks of the model are part of the program."""
        patched = self.__dict__.get("forward")
        if patched is not None and self._autoshard.states.own_forward(self) is None:
            return patched(*args, **kwargs)  # a wrapper of the forward that was there before
        return ShardedModule.forward(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for this call; the first call of its kind captures and compiles it.

        A kind of call is a mode, the shapes and dtypes of tensors, and the other arguments. Raises InputError for a call
        that does not fit, or for replicated values that differ, UserError for a call that exceeds
        `Options(max_programs=...)`, and DistributedError if another rank failed or makes another call.
        """
        return self._autoshard_call(args, kwargs)

    def _autoshard_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call of `forward`; dynamo leaves it as it is."""
        check_modes()
        state = self._autoshard
        found = find_program(self, state, args, kwargs)
        with state.groups.watch.call(shared_call(self, state, found)):
            execution = program_of(self, state, found, lambda: as_written(self))
            state.step += 1
            return execution.run(found.call, state.seed(execution), state.step)

    @property
    def plan(self) -> ShardingPlan:
        """Return the plan of the first program: for training, if the model was first called in that mode."""
        return _first(self).plan

    @property
    def programs(self) -> tuple[Program, ...]:
        """Return the programs in the order in which they were made: the calls they are for, their plans, and seconds."""
        return tuple(self._autoshard.programs)

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of a global batch, given as the arguments of a call.

        Positional arguments come back as a tuple, keyword arguments as a dict, and both together as `(tuple, dict)`:

            loss = model(*model.shard(tokens, labels))
            loss = model(**model.shard(**batch))

        Tensors for a loss outside of the model, which follow the model's arguments or have a name that it does not take, are
        cut like its first input if they are as long as the batch:

            x, labels = model.shard(x, labels)
            loss = cross_entropy(model(x), labels)

            parts = model.shard(**batch, noise=noise)
            noise = parts.pop("noise")
            loss = mse_loss(model(**parts), noise)

        A tensor that the axes do not divide, such as a last batch, comes back as a DTensor, whole on every rank. The
        gradient of a tensor that requires it is that of this rank's part, and of all of it where it is whole. Raises
        InputError for a call that does not fit, and, before anything was captured, with the recipe `context`.
        """
        if not self._autoshard.programs:
            self._autoshard.mode(self, gradients=torch.is_grad_enabled())  # reads the signature of the forward
        positional, named = parts_of(self._autoshard, args, kwargs)
        if not named:
            return positional
        return (positional, named) if positional else named

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Measure one call with this rank's part of a batch, and its backward, and compare them with the prediction.

        The profile has the times of the step, of each collective and of each module, and the hardware's figures that
        fit the measurements. Gradients, buffers and parameters are not changed. All ranks call it together.

        A call that has no program gets one. Raises InputError for a call that does not fit; UserError if the hardware is
        unknown.
        """
        state = self._autoshard
        found = find_program(self, state, args, kwargs)
        with state.groups.watch.call(SharedCall("profile")):
            execution = program_of(self, state, found, lambda: as_written(self))
            fused = state.settings.compile == "inductor"
            return profile(execution, state.groups, found.call, state.seed(execution), fused=fused)

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> DistributedSampler[Any]:
        """Return a sampler for a DataLoader: different samples on axes that split the batch, the same samples on
        others.

        The loader's batch size is this rank's part of the batch. Before anything was captured, the recipes say which axes
        split the batch; raises InputError if `Options(inputs=...)` does.
        """
        state = self._autoshard
        if not state.programs and state.planner.splits().is_constrained:
            _first(self)
        place, ways, part = state.place, 1, 0
        for axis in state.planner.splits().data_axes:
            ways *= place.mesh.sizes[axis]
            part = part * place.mesh.sizes[axis] + place.coordinate[axis]
        return DistributedSampler(dataset, ways, part, shuffle=shuffle, seed=seed, drop_last=drop_last)

    @property
    def save_pretrained(self) -> Callable[..., Any]:
        """Save the model as its library does (transformers, diffusers, peft), with whole parameters, as its own class.

        All ranks call it together, with the arguments of the library's method; the first rank writes. A model whose class
        has no such method has none.
        """
        inherited: Any = super()
        _ = inherited.save_pretrained  # AttributeError is that of any attribute which is not there
        return partial(_save_pretrained, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Return a sharded model with parameters and buffers of its own, on the same mesh; it shares compiled code.

        As in a copy of a plain model, parameters have no gradients: that of a DTensor is copied, that of a Parameter is not.
        """
        state, kind = self._autoshard, type(self)
        with _as_users_class(self):
            copied = copy.deepcopy(self, memo)
        for parameter in copied.parameters():
            parameter.grad = None
        copied.__class__ = kind
        copied._autoshard = state.of_copy(self, copied)
        memo[id(self)] = copied
        return copied

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Convert parameters and buffers, as `to` does; the next call is captured for them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._autoshard.states.forget()
        return self


class OwnFirst:
    """Give what a sharded model adds to its class, unless the model has a part of its own by that name."""

    def __init__(self, name: str, added: Any) -> None:
        self.name, self.added = name, added

    def __get__(self, model: ShardedModule | None, kind: type | None = None) -> Any:
        """Return the model's own part; Python asks only where the model's `__dict__` has no such name."""
        if model is not None:
            for held in (model._parameters, model._buffers, model._modules):
                if self.name in held:
                    return held[self.name]
        return self.added.__get__(model, kind)


_ADDED = ("plan", "programs", "shard", "profile", "sampler", "save_pretrained")


def _warn_of_hidden(kind: type[nn.Module]) -> None:
    """Warn of what the class has under a name that the sharded model uses; its `save_pretrained` is called by ours."""
    for name in _ADDED:
        if name != "save_pretrained" and hasattr(kind, name):
            warnings.warn(
                f"{kind.__name__}.{name} is hidden by what the sharded model has under that name; rename it to use it outside of "
                "the model's forward",
                stacklevel=2,
            )


def shard_module(
    module: nn.Module,
    place: Place,
    groups: MeshGroups,
    planner: Planner,
    settings: CallSettings,
    *,
    planned: LocalProgram | None = None,
    gradients: bool = True,
    started: float | None = None,
) -> ShardedModule:
    """Return a copy of `module` on the mesh of `place`; `module` is not changed. All ranks of the mesh call it
    together.

    A `planned` program, for the module's present mode and `gradients`, is compiled now, and parameters are stored as
    it says from the start. Its seconds are counted from `started`, by `time.perf_counter` (None: from now). Without one,
    parameters are whole on every rank until the first call, which `planner` plans. Raises MeshError, CaptureError, and
    DistributedError if another rank fails.
    """
    started = time.perf_counter() if started is None else started
    layouts = None if planned is None else planned.parameters
    copied = together(groups, "copying the model", lambda: distributed_copy(module, place, layouts))
    allow_in_compiled_code(WholeTensor)  # a loss outside of the model may be compiled
    stream = RandomStream((exchange(groups, origin_of(module))[0],))
    suspects = () if layouts is None else _suspects(module, copied, groups)
    kind = type(module)
    if groups.rank == groups.mesh.ranks[0]:
        _warn_of_hidden(kind)
    body: dict[str, Any] = {"__module__": kind.__module__}
    for method in (ShardedModule._autoshard_call, ShardedModule.shard):  # both refer to tensors by identity
        body[method.__name__] = torch.compiler.disable(method, reason=COMPILED)  # type: ignore[no-untyped-call]
    body |= {name: OwnFirst(name, body.get(name, vars(ShardedModule)[name])) for name in _ADDED}
    copied.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), body)
    sharded = cast(ShardedModule, copied)
    state = sharded._autoshard = RuntimeState(
        kind,
        place,
        groups,
        planner,
        settings,
        stream,
        stored=planned is not None,
        suspects=suspects,
    )
    state.states.given_forward = sharded.__dict__.get("forward")
    refuse_alone(sharded)
    draw_whole(sharded)
    remember_originals(module, sharded)
    take_loaded_states()
    compare_other_parameters(place.device_mesh, groups)
    follow_optimizers()
    if planned is not None:
        described = format_planned(sharded, planned.signature, gradients=gradients)
        install(sharded, state, state.mode(sharded, gradients=gradients), planned, described, started=started)
    return sharded


def _first(model: ShardedModule) -> Program:
    if not model._autoshard.programs:
        raise InputError("nothing was captured yet: give autoshard(..., args=...) or call the model once before")
    return model._autoshard.programs[0]


def _save_pretrained(model: ShardedModule, *args: Any, **kwargs: Any) -> Any:
    groups = model._autoshard.groups
    is_first = groups.rank == groups.mesh.ranks[0]
    with groups.watch.call(SharedCall("save_pretrained")):
        whole: Any = as_written(model, lambda one: whole_copy(one, is_kept=is_first))
        return together(groups, "save_pretrained", lambda: whole.save_pretrained(*args, **kwargs) if is_first else None)


def as_written(model: ShardedModule, copy_of: Callable[[nn.Module], nn.Module] = plain_copy) -> nn.Module:
    """Return the model as its user wrote it, in its present state, with parameters of global shape: on meta, unless
    `copy_of` gives them values.
    """
    own = model._autoshard.states.own_forward(model)
    with _as_users_class(model):
        copied = copy_of(model)
    allow_alone(copied)
    if own is None:
        copied.__dict__.pop("forward", None)
    return copied


@contextmanager
def _as_users_class(model: ShardedModule) -> Iterator[None]:
    """Make the model an instance of its user's class only, without its state, so that it can be copied."""
    state, kind = model._autoshard, type(model)
    del model._autoshard
    model.__class__ = state.kind  # type: ignore[assignment]
    try:
        yield
    finally:
        model.__class__ = kind
        model._autoshard = state


def _suspects(module: nn.Module, copied: nn.Module, groups: MeshGroups) -> tuple[Suspect, ...]:
    """Return the parameters that differ between ranks: no error yet, as a checkpoint may be loaded before the first
    call.
    """
    named = [(name, p) for name, p in module.named_parameters() if not p.is_meta]
    whole = replicated(groups.mesh)
    problems = compare(groups, [Given(f"parameter {name!r}", ONE_MODEL, whole, p) for name, p in named]).differences()
    made = {name: copied.get_parameter(name) for name, _ in named}
    return tuple(
        Suspect(name, made[name], made[name]._version, problems[number])
        for number, (name, _) in enumerate(named)
        if number in problems
    )
