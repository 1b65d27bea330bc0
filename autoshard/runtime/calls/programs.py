"""Find the program for a call of a sharded module, or make it; all programs run on one set of parameters.

A program is made for a mode (gradients or none, and the state of the model: training flags, say), the constants among
the arguments, and the global shapes of the tensors. Making one is an act of all ranks together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import Call, Signature, bind_call, check_leaves
from autoshard.compile.compiled import Mode as Compile
from autoshard.config.options import Bucket
from autoshard.config.progress import Progress, shown, silent
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.runtime.agreement import Given, check_equal_values, check_same_call, together
from autoshard.runtime.build import Partitioned, build_program
from autoshard.runtime.calls import model_state
from autoshard.runtime.calls.arguments import Key, format_arguments, format_call, joined, key_of, signature_key
from autoshard.runtime.calls.buckets import padded
from autoshard.runtime.calls.model_state import ModelStates
from autoshard.runtime.calls.new_parameters import take_over
from autoshard.runtime.calls.optimizer_numbers import numbers_of_steps
from autoshard.runtime.calls.random_stream import RandomStream
from autoshard.runtime.calls.torch_settings import torch_settings
from autoshard.runtime.calls.whole_batches import UNLIKE, unlike_wholes
from autoshard.runtime.execution import Execution, LocalProgram, bind
from autoshard.runtime.global_call import Splits, batch_of, tensors_of
from autoshard.runtime.parameters import Place, lay_out
from autoshard.runtime.process_groups import MeshGroups
from autoshard.runtime.shared_plan import Decided, plan_together
from autoshard.runtime.watch.call_traits import forward_traits
from autoshard.runtime.watch.call_watch import SharedCall
from autoshard.runtime.whole_tensor import WholeTensor, replicated_tensor
from passes._torch import local_of_dtensor, without_dispatch_modes
from passes.errors import InputError, UserError
from passes.ir.layout import Layout, Shard, replicated
from passes.ir.units import format_seconds

_log = logging.getLogger("autoshard.programs")

Mode = tuple[Hashable, ...]


@dataclass(frozen=True)
class FirstCall:
    """A call that has no program yet: the module as the user wrote it, and this rank's arguments."""

    module: nn.Module  # global shapes; parameters on meta
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool  # whether a backward is wanted
    parameters: Mapping[str, Layout] | None  # as stored since an earlier program; None: free to choose
    progress: Progress = silent


class Planner(Protocol):
    """Plans the programs of one module."""

    def __call__(self, call: FirstCall, followed: Decided | None) -> LocalProgram:
        """Return the program of a call; `followed` waits for the first rank's plan."""

    def splits(self) -> Splits:
        """Return how callers split the inputs."""


@dataclass(frozen=True)
class CallSettings:
    """The options that concern the calls of a module."""

    compile: Compile
    max_programs: int
    buckets: Mapping[str, Bucket]
    shows_progress: bool = False
    logs_progress: bool = False  # where there is no terminal, too


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


@dataclass(eq=False)
class Program:
    """A program of a sharded module: what it is for, the seconds that it took to make, and how it runs."""

    mode: Mode
    call: str  # "training, tokens: int64[4, 16]"
    seconds: float
    execution: Execution

    @property
    def plan(self) -> ShardingPlan:
        return self.execution.local.plan

    def __str__(self) -> str:
        return f"{self.call} ({format_seconds(self.seconds)})"


@dataclass
class RuntimeState:
    """A sharded module's state apart from the user's attributes; calls change it."""

    kind: type[nn.Module]  # the user's class
    place: Place
    groups: MeshGroups
    planner: Planner
    settings: CallSettings
    random: RandomStream
    step: int = 0
    stored: bool = False  # parameters are laid out as the first program says
    states: ModelStates = field(default_factory=ModelStates)
    taken_over: dict[str, nn.Parameter] = field(default_factory=dict)  # parameters that no program has laid out yet
    programs: list[Program] = field(default_factory=list)
    by_key: dict[tuple[Mode, Key], Program] = field(default_factory=dict)
    suspects: tuple[Suspect, ...] = ()
    unseen: set[str] = field(default_factory=set)  # attributes that hold too many objects, as was said once
    repeated: set[str] = field(default_factory=set)  # axes whose ranks gave equal batches, and such inputs, as was said once

    def mode(self, model: nn.Module, *, gradients: bool) -> Mode:
        """Return what a program depends on besides its arguments; parameters that are new are taken over."""
        device = self.place.device.type
        if not self.states.is_current():
            taken = take_over(model, self.place)
            self.taken_over |= taken
            self.states.update(model, self.kind, is_new=bool(taken) and self.stored)
        return (
            gradients,
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            *torch_settings(),
            self.states.current,
        )

    def seed(self, execution: Execution) -> torch.Tensor:
        """Return the seed of the present call of a program."""
        if not execution.is_random:
            return torch.zeros((), dtype=torch.int64, device=self.place.device)
        return self.random.seed(self.step, self.place.device)

    def of_copy(self, model: nn.Module, copied: nn.Module) -> RuntimeState:
        """Return the state of a copy of `model`: the programs of its present state run on the copy's parameters."""
        self.mode(model, gradients=True)
        states = ModelStates(self.states.names, self.states.stored, given_forward=copied.__dict__.get("forward"))
        states.outside.add(self.states.outside.reads.values())
        states.update(copied, self.kind)
        states.values_agree(writes=self.states.writes())
        programs = [
            replace(
                program,
                mode=(*program.mode[:-1], states.current),
                execution=bind(
                    program.execution.program, program.execution.local, copied, self.place, self.groups.watch
                ),
            )
            for program in self.programs
            if program.mode[-1] == self.states.current
        ]
        random = self.random.of_copy()
        return replace(self, random=random, states=states, programs=programs, by_key={}, suspects=(), taken_over={})

    def layouts(self, model: nn.Module) -> dict[str, Layout] | None:
        """Return the layouts of parameters that a program has laid out; None before there is one."""
        if not self.stored:
            return None
        new = set(map(id, self.taken_over.values()))
        return {
            name: self.place.storage_of(parameter).layout
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if isinstance(parameter, DTensor) and id(parameter) not in new
        }


@dataclass(frozen=True)
class Found:
    """A call with its arguments padded, and the program for it, if it was made before."""

    call: Call
    mode: Mode
    key: Key
    program: Program | None


def find_program(model: nn.Module, state: RuntimeState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Look for the program that runs a call. Raises InputError if the model's forward does not take the arguments."""
    gradients = torch.is_grad_enabled()
    mode = state.mode(model, gradients=gradients)
    call = padded(_with_whole(bound_call(state, args, kwargs), state.place), state.settings.buckets)
    key = key_of(call, gradients=gradients)
    return Found(call, mode, key, state.by_key.get((mode, key)))


def _with_whole(call: Call, place: Place) -> Call:
    """Return the call with tensors that are known to be whole on every rank as DTensors."""
    marked = {path: leaf.plain() for path, leaf in call.leaves.items() if isinstance(leaf, WholeTensor)}
    whole = {path: replicated_tensor(one, place) if one.dim() > 0 else one for path, one in marked.items()}
    return replace(call, leaves=call.leaves | whole) if whole else call


def shared_call(model: nn.Module, state: RuntimeState, found: Found) -> SharedCall:
    """Return a forward as all ranks have to make it."""
    program = "to be made" if found.program is None else str(state.programs.index(found.program) + 1)
    described = format_call(found.call) if found.program is None else found.program.call
    words = f"{'training' if model.training else 'evaluation'}, {'with' if found.mode[0] else 'without'} gradients"
    states = state.states
    traits = forward_traits(
        program,
        training=states.training,
        trained=states.trained,
        writes=states.writes() if state.step else 0,
        numbers=numbers_of_steps(states.parameter_ids),
    )
    return SharedCall(f"forward call {state.step + 1}", words, traits, described)


def program_of(
    model: nn.Module, state: RuntimeState, found: Found, as_written: Callable[[], nn.Module]
) -> Execution:
    """Return the program that runs a call; make the program if there is none.

    `as_written` returns the model as its user wrote it, in its present state. Raises UserError if there are as many
    programs as may be, DistributedError if ranks make different calls.
    """
    program = found.program
    if program is None:
        program = _met(model, state, found.mode, found.call, as_written)
        state.by_key[found.mode, found.key] = program
    return program.execution


def _met(
    model: nn.Module, state: RuntimeState, mode: Mode, call: Call, as_written: Callable[[], nn.Module]
) -> Program:
    """Return the program of a call that was not made before; all ranks meet here."""
    changes = state.states.changes(_state_of(state.programs[-1].mode)) if state.programs else ()
    said = (_format_mode(model, mode), *format_arguments(call), *changes[:_SHOWN])
    check_same_call(state.groups, said)
    described = joined(said)
    if changes and state.states.current not in (_state_of(program.mode) for program in state.programs):
        _tell(state, changes)
    program = _known(state, mode, call) or _made(model, state, mode, call, described, as_written)
    together(state.groups, "the first call", lambda: _check_first(state, program.execution, call))
    if state.step == 0:
        _agree_on_values(model, state, program.execution)
    _agree_on_inputs(state, program.execution, call)
    return program


def _state_of(mode: Mode) -> int:
    number = mode[-1]
    assert isinstance(number, int)
    return number


def _tell(state: RuntimeState, changes: tuple[str, ...]) -> None:
    """Say on the first rank that the model changed."""
    if state.groups.rank == state.groups.mesh.ranks[0]:
        more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        _log.warning("the model changed, and is captured again: %s%s", "; ".join(changes[:_SHOWN]), more)


def _tell_unseen(state: RuntimeState) -> None:
    """Say on the first rank which attributes hold too many objects to look at all before each call."""
    new = [path for path in state.states.unseen if path not in state.unseen]
    state.unseen.update(new)
    for path in new if state.groups.rank == state.groups.mesh.ranks[0] else ():
        _log.warning(
            "%s holds more than %d objects, and a change of one beyond these is not noticed: the program stays as it is. Assign "
            "a new object to %s to have the model captured again, or keep what does not matter to forward elsewhere",
            path,
            model_state.OBJECTS_MAX,
            path,
        )


def bound_call(state: RuntimeState, args: tuple[Any, ...], kwargs: dict[str, Any], advice: str = "") -> Call:
    """Return the call of the model's forward with these arguments.

    Raises InputError, with advice, if it does not take them, and CaptureError for what is neither a tensor nor a constant.
    """
    signature = state.states.signature
    try:
        call = bind_call(signature, args, kwargs)
    except TypeError as error:
        raise InputError(f"{state.kind.__name__}.forward{signature} cannot be called like this: {error}{advice}") from error
    check_leaves(call)
    return call


def _known(state: RuntimeState, mode: Mode, call: Call) -> Program | None:
    """Return the program whose global inputs are those of `call`, which may give them in another form."""
    tensors, splits = tensors_of(call.leaves), state.planner.splits()
    batch = batch_of(tensors)
    whole = {path: splits.whole(path, tensor, batch) for path, tensor in tensors.items()}
    key = key_of(replace(call, leaves=call.leaves | whole), gradients=bool(mode[0]))
    for program in state.programs:
        signature = program.execution.local.signature
        if program.mode == mode and key == signature_key(signature, gradients=bool(mode[0])):
            return program
    return None


def _made(
    model: nn.Module,
    state: RuntimeState,
    mode: Mode,
    call: Call,
    described: str,
    as_written: Callable[[], nn.Module],
) -> Program:
    """Make the program of a call on all ranks together."""
    started = time.perf_counter()
    _check_number(state, described)
    args, kwargs = call.with_leaves(call.leaves)
    name = f"{state.kind.__name__}: program {len(state.programs) + 1}"

    def plan(followed: Decided | None) -> LocalProgram:
        layouts = state.layouts(model)
        return state.planner(FirstCall(as_written(), args, kwargs, bool(mode[0]), layouts, progress), followed)

    with (
        torch.inference_mode(mode=False),
        torch.set_grad_enabled(bool(mode[0])),  # what is made outlives the mode
        without_dispatch_modes(),
        shown(
            f"{name}, for {described}: capture, plan, compile{_last(state)}",
            enabled=state.settings.shows_progress,
            logged=name if state.settings.logs_progress else "",
        ) as progress,
    ):
        local = plan_together(state.groups, plan)
        progress("compile")
        return install(model, state, mode, local, described, started=started)


def _last(state: RuntimeState) -> str:
    """Return what is said of the last program while another is made."""
    number, last = len(state.programs), state.programs[-1:]
    return "".join(f"; program {number} took {format_seconds(one.seconds)}" for one in last)


def install(
    model: nn.Module, state: RuntimeState, mode: Mode, local: LocalProgram, described: str, *, started: float
) -> Program:
    """Compile a planned program, and store the parameters as it says if it is the first."""
    made = [program.execution for program in state.programs]
    earlier = [Partitioned(one.local.graph, one.program.split) for one in made]
    built = build_program(local, state.groups, mode=state.settings.compile, earlier=earlier)
    state.groups = built.groups
    if not state.stored or state.taken_over:
        _agree_on_parameters(model, state)
        lay_out(model, state.place, local.parameters)
        state.stored, state.taken_over = True, {}
        state.states.settle(model, state.kind)
    state.states.read(model, state.kind, local.names, local.outside, local.new_values.changes)
    _tell_unseen(state)
    seconds = time.perf_counter() - started
    local = replace(local, plan=replace(local.plan, remarks=(*local.plan.remarks, *built.remarks)))
    program = Program(mode, described, seconds, bind(built.program, local, model, state.place, state.groups.watch))
    state.programs.append(program)
    _log.info("program %d: %s", len(state.programs), program)
    return program


def _check_number(state: RuntimeState, described: str) -> None:
    most = state.settings.max_programs
    if len(state.programs) < most:
        return
    made = "".join(f"\n  {program}" for program in state.programs[-_SHOWN:])
    raise UserError(
        f"the call ({described}) needs a program of its own, and the model has {most}, as many as "
        f"Options(max_programs={most}) allows; pad inputs to few sizes with Options(buckets=...), pass numbers that change "
        f"as tensors, or allow more. The last programs:{made}"
    )


_SHOWN = 4  # programs that a message lists


def _format_mode(model: nn.Module, mode: Mode) -> str:
    words = "training" if model.training else "evaluation"
    return words if mode[0] else f"{words} without gradients"


def format_planned(model: nn.Module, signature: Signature, *, gradients: bool) -> str:
    """Return a call that was planned with global inputs, as `Program.call` has it."""
    inputs = ", ".join(map(str, signature.inputs))
    return f"{_format_mode(model, (gradients,))}, global {inputs}"


def _agree_on_parameters(model: nn.Module, state: RuntimeState) -> None:
    """Check that whole parameters are equal before they are cut: ranks with different seeds would mix different
    models.
    """
    whole = replicated(state.place.mesh)
    given = [
        Given(f"parameter {name!r}", ONE_MODEL, whole, local_of_dtensor(parameter))
        for name, parameter in state.taken_over.items() or _distributed(model)
        if isinstance(parameter, DTensor) and not parameter.is_meta
    ]
    check_equal_values(state.groups, given)


def _agree_on_values(model: nn.Module, state: RuntimeState, execution: Execution) -> None:
    """Check before the first step that values which several ranks hold are equal: ranks would train different models.

    Parameters may have been loaded since they were stored, and buffers are not compared before.
    """
    whole, mesh = replicated(state.place.mesh), state.place.mesh
    stored = {name: (local_of_dtensor(p), state.place.storage_of(p).layout) for name, p in _distributed(model) if not p.is_meta}
    given = [
        Given(f"parameter {name!r}", ONE_MODEL, layout, local)
        for name, (local, layout) in stored.items()
        if any(size > 1 and not isinstance(layout.on(axis), Shard) for axis, size in enumerate(mesh.sizes))
    ]
    held = [("buffer", model.named_buffers()), ("attribute", execution.held_values().items())]
    given += [
        Given(f"{kind} {name!r}", ONE_MODEL, whole, tensor)
        for kind, tensors in held
        for name, tensor in tensors
        if not tensor.is_meta and tensor.layout == torch.strided
    ]
    check_equal_values(state.groups, given)
    state.states.values_agree()


def _distributed(model: nn.Module) -> list[tuple[str, DTensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]


ONE_MODEL = "build the model with the same seed on every rank, or load the same state_dict"


def _check_first(state: RuntimeState, execution: Execution, call: Call) -> None:
    """Check what a call gives, and parameters that were unequal, on this rank."""
    execution.check_inputs(call)
    for suspect in state.suspects:
        if suspect.name in execution.parameters:
            suspect.check(execution.parameters[suspect.name].slot.read())


def _agree_on_inputs(state: RuntimeState, execution: Execution, call: Call) -> None:
    """Check that inputs are equal where they are replicated, and say where parts of a batch are equal, too."""
    taken = execution.take_inputs(call)
    advice = "give ranks that differ only on this axis the same batch, as model.sampler(...) does"
    given = [
        Given(f"input {item.spec.path!r}", advice, item.layout, tensor)
        for item, tensor in zip(execution.inputs, taken, strict=True)
    ]
    compared = check_equal_values(state.groups, given)
    is_plain = not any(isinstance(tensor, DTensor) for tensor in tensors_of(call.leaves).values())
    axes = [axis for axis in (compared.repeated_axes() if is_plain else ()) if axis not in state.repeated]
    state.repeated.update(axes)
    if axes and state.groups.rank == state.groups.mesh.ranks[0]:
        _log.warning(
            "the ranks of axis %s gave equal inputs, but each rank is to give its own part of the batch: the same samples "
            "are taken more than once. Cut a whole batch with model.shard(...), or let each rank load other samples with "
            "model.sampler(...)",
            ", ".join(map(repr, axes)),
        )
    for axis, item in compared.shared() if is_plain else ():
        if item.what not in state.repeated and state.groups.rank == state.groups.mesh.ranks[0]:
            _log.warning(
                "the ranks of axis %r gave equal values of %s, but other inputs differ: it has as many rows as a rank's part of "
                "the batch, so it is taken for a part, and all parts are joined. If each rank is to read all of it, say so with "
                "Options(inputs={%s: {%r: 'R'}})",
                axis,
                item.what,
                item.what.removeprefix("input "),
                axis,
            )
        state.repeated.add(item.what)
    layouts = {item.spec.path: item.layout for item in execution.inputs}
    for axis, paths in unlike_wholes(state.groups, tensors_of(call.leaves), layouts).items():
        if UNLIKE not in state.repeated and state.groups.rank == state.groups.mesh.ranks[0]:
            _log.warning(UNLIKE, axis, joined([repr(path) for path in paths]))
        state.repeated.add(UNLIKE)
