"""Bind a compiled program to a module's tensors, and run it under autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from autoshard.capture.changes import NOTHING_NEW, NewValues
from autoshard.capture.held_objects import Path, format_path, held_objects, reach
from autoshard.capture.signature import Call, Signature
from autoshard.compile.compiled import Program, Split, strided_like
from autoshard.compile.overlap import OverlapPhase
from autoshard.dumps.graph_dump import GraphDump
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.runtime.call_inputs import LocalInput
from autoshard.runtime.calls.refused_modes import COMPILED
from autoshard.runtime.gradient_scale import gradient_scale
from autoshard.runtime.output_gradients import OutputGradients
from autoshard.runtime.parameters import Place
from autoshard.runtime.placements import Storage, dtensor_placements
from autoshard.runtime.reached_gradients import outputs_of_gradients
from autoshard.runtime.saved_buffers import SavedBuffer, write_buffer
from autoshard.runtime.watch.call_watch import SharedCall, Watch
from autoshard.runtime.whole_tensor import WholeTensor
from passes._torch import (
    DTensorSpec,
    OutsideRead,
    dtensor_of_local,
    dtensor_spec,
    is_batched,
    keeps_graph,
    local_of_dtensor,
    memory_of,
    reentrant_checkpoint,
)
from passes.errors import CompilerError, UserError
from passes.ir.graph import InputRole, OutputRole, has_input, input_of
from passes.ir.layout import Layout


@dataclass(frozen=True)
class LocalProgram:
    """A LOCAL graph to compile, and the layouts of the user's values at its borders.

    `inputs` and `outputs` are in the order of `signature.inputs` and `signature.outputs`; `parameters` has every
    parameter's layout, under each of its names. `constants` are values of BUFFER inputs that are not buffers of the
    module. `output_gradients` says how gradients of outputs enter the backward. Calls split the batch, but `whole_outputs`, by
    number, are whole on every rank. Without `overlap`, collectives are awaited where they are issued. `names` are those that the
    captured code reads (None: not known), `outside` what it reads from outside of the model. Each call stores `new_values` in the
    module's objects.
    """

    graph: GraphModule
    signature: Signature
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    parameters: Mapping[str, Layout]
    constants: Mapping[str, torch.Tensor]
    output_gradients: OutputGradients
    whole_outputs: frozenset[int]
    plan: ShardingPlan
    dump: GraphDump | None = None
    overlap: OverlapPhase | None = None
    names: frozenset[str] | None = None
    outside: tuple[OutsideRead, ...] = ()
    new_values: NewValues = NOTHING_NEW


@dataclass(frozen=True)
class Slot:
    """The place where a module holds a parameter or buffer; the object may change (`load_state_dict(assign=True)`)."""

    tensors: Mapping[str, torch.Tensor | None]
    name: str

    def read(self) -> torch.Tensor:
        tensor = self.tensors[self.name]
        if tensor is None:
            raise CompilerError(f"the module has lost its tensor {self.name!r}")
        return tensor


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module holds as a plain attribute, whole on every rank; the object may change."""

    module: nn.Module
    path: Path
    device: torch.device

    def read(self) -> torch.Tensor:
        tensor: torch.Tensor = reach(self.module, self.path)
        return tensor.detach().to(self.device)


@dataclass(frozen=True)
class StoredParameter:
    """A PARAMETER input: its name in the model, where it is held, how it is stored, and what its gradient is."""

    name: str
    slot: Slot
    storage: Storage
    spec: DTensorSpec
    dtype: torch.dtype

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stored part in the form that the graph takes."""
        assert isinstance(tensor, DTensor)
        part = local_of_dtensor(tensor)
        if part.is_meta:
            raise UserError(
                f"parameter {self.name!r} has no data, as the model was made on meta; before the first call, "
                "model.to_empty(device=...) makes room, and load_state_dict or an initialization fills it"
            )
        if part.dtype != self.dtype:
            raise UserError(
                f"parameter {self.name!r} is {part.dtype} now, and was {self.dtype} when the model was captured; convert the "
                "whole model: model.to(...)"
            )
        return part if self.storage.is_even else self.storage.pad(part)

    def gradient(self, part: torch.Tensor) -> DTensor:
        if not self.storage.is_even:
            part = self.storage.unpad(part)
        return dtensor_of_local(part.contiguous(), self.spec)


@dataclass(frozen=True)
class Results:
    outputs: tuple[torch.Tensor, ...]
    saved: list[torch.Tensor | SavedBuffer]


@dataclass(frozen=True)
class Execution:
    """A program with its module's tensors, and the order of its inputs and results."""

    program: Program
    local: LocalProgram
    place: Place
    inputs: tuple[LocalInput, ...]  # in the order of the signature
    parameters: Mapping[str, StoredParameter]  # by FQN
    buffers: Mapping[str, Slot | Attribute | torch.Tensor]  # by FQN; constants as they are
    coordinates: Mapping[str, torch.Tensor]  # by axis
    parameter_names: tuple[str, ...]  # PARAMETER inputs in order
    gradient_of: Mapping[str, int]  # name of a GRADIENT -> its number among the gradients
    tangent_outputs: tuple[int, ...]  # per tangent, the number of its output
    gradient_outputs: Mapping[str, frozenset[int]]  # name of a GRADIENT -> numbers of the outputs that it is computed from
    saved_parameters: frozenset[str]  # those that the backward reads
    watch: Watch
    module: nn.Module

    @property
    def is_random(self) -> bool:
        """Return whether a call draws random numbers."""
        return any(given.role is InputRole.SEED for given in self.program.split.inputs)

    def run(self, call: Call, seed: torch.Tensor, number: int = 0) -> Any:
        """Run one call of the model on this rank's part of the inputs; return this rank's part of the model's output.

        `number` is that of the call, by which its backward is told from others.
        """
        inputs = self.take_inputs(call)
        parameters = tuple(self.parameters[name].slot.read() for name in self.parameter_names)
        scales = self._gradient_scales(inputs)
        outputs = _Step.apply(self, number, scales, seed, *inputs, *parameters)  # type: ignore[no-untyped-call]
        self.local.new_values.store(self.module, outputs)
        whole = self.local.whole_outputs
        return self.local.signature.unflatten([WholeTensor.of(one) if i in whole else one for i, one in enumerate(outputs)])

    def _gradient_scales(self, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return the factors for gradients of inputs that are computed from other tensors, by path."""
        named = zip(self.local.signature.inputs, inputs, strict=True) if torch.is_grad_enabled() else ()
        again = reentrant_checkpoint()
        made = ((spec.path, given) for spec, given in named if given.requires_grad and (given.grad_fn is not None or again))
        return {path: gradient_scale(path, given, _output_scale, again) for path, given in made}

    def take_inputs(self, call: Call) -> list[torch.Tensor]:
        """Return this rank's parts of the tensors of a call, in the order of `signature.inputs`; DTensors are
        redistributed.
        """
        return [item.take(call.leaves[item.spec.path], self.place) for item in self.inputs]

    def held_values(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the program reads, and that are no parameters or buffers, by name."""
        held = {name: one.read() if isinstance(one, Attribute) else one for name, one in self.buffers.items()}
        return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}

    def check_inputs(self, call: Call) -> None:
        """Raise InputError for a call that does not fit."""
        for item in self.inputs:
            item.check(call.leaves[item.spec.path], self.place)

    def forward(
        self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], seed: torch.Tensor
    ) -> Results:
        """Run the forward, and write new values of buffers back."""
        by_role: dict[InputRole, Mapping[str, torch.Tensor]] = {
            InputRole.INPUT: dict(zip((s.path for s in self.local.signature.inputs), inputs, strict=True)),
            InputRole.PARAMETER: {
                name: self.parameters[name].local(tensor)
                for name, tensor in zip(self.parameter_names, parameters, strict=True)
            },
            InputRole.BUFFER: {n: s if isinstance(s, torch.Tensor) else s.read() for n, s in self.buffers.items()},
            InputRole.COORDINATE: self.coordinates,
            InputRole.SEED: {"step": seed},
        }
        split = self.program.split
        arguments = [
            strided_like(by_role[given.role][given.name], like)
            for given, like in zip(split.inputs, split.input_values, strict=True)
        ]
        owned = {id(tensor) for tensor in arguments}
        outputs, new_buffers, saved = self.program.forward(arguments)
        held = {id(tensor): name for name, tensor in by_role[InputRole.BUFFER].items() if isinstance(self.buffers[name], Slot)}
        kept = [SavedBuffer(held[id(tensor)], tensor) if id(tensor) in held else tensor for tensor in saved]
        names = [output.name for output in split.outputs if output.role is OutputRole.BUFFER]
        for name, value in zip(names, new_buffers, strict=True):
            write_buffer(by_role[InputRole.BUFFER][name], value)
        return Results(_distinct(outputs, owned), kept)

    def backward(
        self, number: int, saved: list[torch.Tensor | SavedBuffer], tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return local gradients in the order of the program; an output without a tangent gets a zero one.

        All ranks run the backward of their call of this `number`. `saved` is emptied, so that its tensors can be freed early.
        """
        given = {output: tangent for output, tangent in enumerate(tangents) if tangent is not None}
        joined = self.local.output_gradients.axes_to_join(given)
        names = ", ".join(self.local.signature.outputs[output] for output in joined)
        call = SharedCall(f"backward call {number}", f"whose loss uses what all ranks share: output {names}" if joined else "")
        with self.watch.call(call):
            plain = {output: _plain(tangent) for output, tangent in given.items()}
            for output, axes in joined.items():
                plain[output] = self.local.output_gradients.join(plain[output], axes, self.place)
            return self._backward(saved, plain)

    def _backward(
        self, saved: list[torch.Tensor | SavedBuffer], tangents: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        tensors = [one.read() if isinstance(one, SavedBuffer) else one for one in saved]
        saved.clear()
        split = self.program.split
        given = [
            _tangent(tangents.get(output), like, self.local.output_gradients.scale(output))
            for output, like in zip(self.tangent_outputs, split.tangent_values, strict=True)
        ]
        return self.program.backward(tensors, given)


def _distinct(outputs: Sequence[torch.Tensor], owned: set[int]) -> tuple[torch.Tensor, ...]:
    """Return outputs as distinct objects, since autograd marks each object that it is given."""
    seen = set(owned)
    distinct = []
    for output in outputs:
        distinct.append(output.detach() if id(output) in seen else output)
        seen.add(id(output))
    return tuple(distinct)


def _read_again(signature: Signature, results: Results, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of the outputs and inputs that the backward reads."""
    memory = {memory_of(one) for one in results.saved if isinstance(one, torch.Tensor)}
    paths = ("the output" if path == "output" else f"output {path}" for path in signature.outputs)
    given = (f"input {spec.path}" for spec in signature.inputs)
    named = (*zip(paths, results.outputs, strict=True), *zip(given, inputs, strict=True))
    return [name for name, tensor in named if memory_of(tensor) in memory]


def _changed_since(names: Sequence[str], error: RuntimeError) -> Exception:
    """Return the UserError for a tensor that was changed between a forward and its backward; another error as it is."""
    if "modified by an inplace operation" not in str(error) or not names:
        return error
    return UserError(
        f"{' or '.join(names)} was changed in place between a forward and its backward, which needs it as it was; make a new "
        "tensor: y = y / 2, not y /= 2"
    )


def _plain(tangent: torch.Tensor) -> torch.Tensor:
    """Return a tangent as a plain tensor; it is a DTensor if a term of parameters was added to the loss."""
    return tangent.full_tensor() if isinstance(tangent, DTensor) else tangent


def _tangent(given: torch.Tensor | None, like: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a tangent with the dtype and strides that the program was compiled for."""
    if given is None:
        return _zeros(like)
    given = strided_like(given.to(like.dtype), like)
    return given if scale == 1.0 else given * scale


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


class _Step(torch.autograd.Function):
    """Autograd function of one call: DTensor parameters and plain inputs in, plain outputs out; gradients as DTensors.
    """

    @staticmethod
    def forward(
        ctx: Any, execution: Execution, number: int, scales: dict[str, float], seed: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        ctx.scales = scales
        count = len(execution.local.signature.inputs)
        results = execution.forward(tensors[:count], tensors[count:], seed)
        ctx.execution, ctx.number, ctx.gradients = execution, number, _uncompiled_gradients()
        # Use DTensor's version counter: a write to a DTensor does not increment that of its local tensor.
        ctx.versions = [
            (name, tensor, tensor._version)
            for name, tensor in zip(execution.parameter_names, tensors[count:], strict=True)
            if name in execution.saved_parameters
        ]
        ctx.buffers = [one if isinstance(one, SavedBuffer) else None for one in results.saved]
        ctx.read_again = _read_again(execution.local.signature, results, tensors[:count])
        ctx.save_for_backward(*(one for one in results.saved if isinstance(one, torch.Tensor)))
        ctx.set_materialize_grads(False)
        differentiable = set(execution.tangent_outputs)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(results.outputs) if i not in differentiable))
        # Autograd refuses to change a view that a function returns: here, the change would not be seen in what it is a view of.
        views = execution.local.signature.views & differentiable
        return tuple(one.view_as(one) if number in views else one for number, one in enumerate(results.outputs))

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        return ctx.gradients(ctx, tangents)


def _gradients(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> Any:
    """Return the gradients of what a call was given, as `_Step.backward` does."""
    if torch.is_grad_enabled():
        raise UserError(
            "a sharded model has no second derivative: backward(create_graph=True) would silently leave it out; "
            "compute what needs it on one device, or inside the model"
        )
    if any(is_batched(tangent) for tangent in tangents if tangent is not None):
        raise UserError(
            "many gradients in one backward (is_grads_batched=True, jacobian(vectorize=True)) are computed by vmap, which cannot "
            "transform the compiled backward of a sharded model; call torch.autograd.grad for each of them, with "
            "retain_graph=True"
        )
    execution: Execution = ctx.execution
    for name, parameter, version in ctx.versions:
        if parameter._version != version:
            raise UserError(
                f"parameter {name!r} was changed in place between a forward and its backward, which needs it as "
                "it was; call backward before optimizer.step()"
            )
    try:
        tensors = iter(ctx.saved_tensors)
    except RuntimeError as error:
        raise _changed_since(ctx.read_again, error) from None
    saved = [next(tensors) if buffer is None else buffer for buffer in ctx.buffers]
    del tensors
    ctx.maybe_clear_saved_tensors()
    if not keeps_graph():
        del ctx.buffers
    gradients = execution.backward(ctx.number, saved, tangents)
    paths = [spec.path for spec in execution.local.signature.inputs]
    names = [*(f"input:{path}" for path in paths), *execution.parameter_names]
    scales = {f"input:{path}": scale for path, scale in ctx.scales.items() if scale != 1.0}
    given = {number for number, tangent in enumerate(tangents) if tangent is not None}
    found = []
    for name, needed in zip(names, ctx.needs_input_grad[4:], strict=True):
        number = execution.gradient_of.get(name)
        if number is not None and given.isdisjoint(execution.gradient_outputs[name]):
            number = None  # as autograd gives no gradient where none of its outputs is used
        part = gradients[number] if needed and number is not None else None
        if part is not None and name in execution.parameters:
            part = execution.parameters[name].gradient(part)
        found.append(part * scales[name] if part is not None and name in scales else part)
    return None, None, None, None, *found


@functools.cache
def _uncompiled_gradients() -> Callable[..., Any]:
    """Return `_gradients` as dynamo leaves it alone: a function that is compiled may call `backward()`."""
    disabled: Callable[..., Any] = torch.compiler.disable(_gradients, reason=COMPILED)  # type: ignore[no-untyped-call]
    return disabled


def _output_scale(node: Any, number: int) -> float | None:
    """Return what a call of a sharded model, as a node of autograd, multiplies the gradient of an output by."""
    is_ours = isinstance(node, _Step._backward_cls)
    return node.execution.local.output_gradients.scale(number) if is_ours else None


def bind(program: Program, local: LocalProgram, module: nn.Module, place: Place, watch: Watch) -> Execution:
    """Bind `program`, compiled from `local`, to the tensors of `module`."""
    split = program.split
    slots = {**parameter_slots(module), **_buffer_slots(module)}
    parameters = {}
    for name in (given.name for given in split.inputs if given.role is InputRole.PARAMETER):
        held = slots[name].read()
        assert isinstance(held, DTensor), f"parameter {name} is no DTensor"
        storage = place.storage(local.parameters[name], tuple(held.shape))
        placements = dtensor_placements(storage.layout, place.mesh)
        spec = dtensor_spec(place.device_mesh, placements, storage.shape, held.dtype)
        parameters[name] = StoredParameter(name, slots[name], storage, spec, held.dtype)
    buffers: dict[str, Slot | Attribute | torch.Tensor] = {}
    attributes = {format_path(path): path for path, held in held_objects(module) if isinstance(held, torch.Tensor)}
    for name in (given.name for given in split.inputs if given.role is InputRole.BUFFER):
        constant = local.constants.get(name)
        if constant is None:
            buffers[name] = slots[name]
        elif name in attributes:
            buffers[name] = Attribute(module, attributes[name], place.device)
        else:
            buffers[name] = constant.to(place.device)
    outputs = [output.name for output in split.outputs]
    return Execution(
        program,
        local,
        place,
        tuple(LocalInput(spec, layout) for spec, layout in zip(local.signature.inputs, local.inputs, strict=True)),
        parameters,
        buffers,
        {
            axis: torch.tensor([at], device=place.device)
            for axis, at in zip(place.mesh.names, place.coordinate, strict=True)
        },
        tuple(parameters),
        {gradient.name: number for number, gradient in enumerate(split.gradients)},
        tuple(outputs.index(tangent.name) for tangent in split.tangents),
        {
            gradient: frozenset(map(outputs.index, made_from))
            for gradient, made_from in outputs_of_gradients(local.graph).items()
        },
        _saved_parameters(split),
        watch,
        module,
    )


def _saved_parameters(split: Split) -> frozenset[str]:
    if split.backward is None:
        return frozenset()
    roles = [input_of(node) for node in split.backward.graph.find_nodes(op="placeholder") if has_input(node)]
    return frozenset(given.name for given in roles if given.role is InputRole.PARAMETER)


def parameter_slots(module: nn.Module) -> dict[str, Slot]:
    """Return where each parameter is held, by FQN; a tied one under each of its names."""
    return {
        _join(prefix, name): Slot(child._parameters, name)
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name, parameter in child._parameters.items()
        if parameter is not None
    }


def _buffer_slots(module: nn.Module) -> dict[str, Slot]:
    return {
        _join(prefix, name): Slot(child._buffers, name)
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child._buffers.items()
        if buffer is not None
    }


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
