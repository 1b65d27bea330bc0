"""One step of a model on all ranks of a mesh, in one process, and the same step on one device.

The ranks run the program that autoshard makes; the device runs the model itself under PyTorch's autograd, so that
capture is checked with the rest. Nothing here knows a process group.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoshard.capture.capture import Captured
from autoshard.capture.changes import NOTHING_NEW, NewValues
from autoshard.capture.held_objects import copies_of_computed
from autoshard.capture.signature import bind_call
from autoshard.compile.compiled import Split, strided_like
from autoshard.debug.rank_interpreter import run_ranks
from autoshard.planner.make_plan import Planned
from passes._torch import flatten_pytree
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    input_of,
    layout_of,
    outputs_of,
    placeholders,
    returned,
    tensor_of,
)
from passes.ir.layout import Layout, Replicate, assemble, local_part
from passes.ir.mesh import Mesh

SEED = 1234  # of the random numbers of a step


class Call(NamedTuple):
    """A model and the arguments of one call, both on one device and global."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    new_values: NewValues = NOTHING_NEW  # that the call stores in objects of the model
    outputs: frozenset[str] | None = None  # paths of those that a program returns, each tensor once; None: all

    def returning(self, captured: Captured) -> Call:
        """Return the call with the outputs and new values of a program."""
        return self._replace(new_values=captured.call.new_values, outputs=frozenset(captured.signature.outputs))


@dataclass(frozen=True)
class Step:
    """Results of one step, all of it global: tensors by path or FQN. Gradients that are None are left out."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]  # of parameters by FQN, of inputs by "input:<path>"
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Results:
    """A step assembled, and what each rank had of it."""

    step: Step
    parts: Sequence[Mapping[Output, Tensor]]
    apart: Mapping[Output, float]  # relative error of copies, of results that not all ranks have the same copy of


@dataclass(frozen=True)
class Ranks:
    """A planned call on simulated ranks; `held` are each rank's parameters, buffers and constants."""

    call: Call
    mesh: Mesh
    planned: Planned
    held: Sequence[dict[Input, Tensor]]

    @staticmethod
    def of(call: Call, planned: Planned) -> Ranks:
        """Return ranks that each hold their part of the model's parameters and buffers."""
        mesh = planned.plan.mesh
        whole = {Input(InputRole.PARAMETER, name): p.detach() for name, p in call.model.named_parameters()}
        whole |= {Input(InputRole.BUFFER, name): b for name, b in call.model.named_buffers()}
        whole |= {Input(InputRole.BUFFER, name): constant for name, constant in planned.captured.constants.items()}
        nodes = [node for node in placeholders(planned.graph.graph) if input_of(node) in whole]
        held = [
            {input_of(node): _held(local_part(whole[input_of(node)], layout_of(node), mesh, at), node) for node in nodes}
            for at in mesh.coordinates()
        ]
        return Ranks(call, mesh, planned, held)

    def run(
        self,
        seed: int = SEED,
        watch: Callable[[Node, Sequence[Any]], None] | None = None,
        *,
        same_copies: bool = True,
    ) -> Results:
        """Run one step, or one forward where the program is no more; what the ranks hold stays as it is.

        `watch` is given each call of the program as it is made, with every rank's value. Raises AssertionError where ranks
        give different copies of a result, unless `same_copies` is false.
        """
        given = self.given(placeholders(self.planned.graph.graph), seed)
        results = run_ranks(self.planned.graph, self.mesh, given, watch)
        found = self._assembled(outputs_of(self.planned.graph.graph), results)
        assert not (same_copies and found.apart), f"{[one.name for one in found.apart]} differ between ranks that hold a copy"
        return found

    def run_partitioned(self, split: Split) -> Results:
        """Run one step of a partitioned program, as `run` does; ranks may give different copies of a result."""
        return self._assembled((*split.outputs, *split.gradients), self.run_split(split))

    def _assembled(self, outputs: Sequence[Output], results: Sequence[Sequence[Any]]) -> Results:
        """Return the results of all ranks, which are in the order of `outputs`, put together."""
        positions = {output: i for i, output in enumerate(outputs) if results[0][i] is not None}
        whole: dict[OutputRole, dict[str, Tensor]] = {role: {} for role in OutputRole}
        apart: dict[Output, float] = {}
        for output, position in positions.items():
            parts = [result[position] for result in results]
            layout, shape = self._laid_out(output)
            if error := copies_apart(parts, layout, self.mesh):
                apart[output] = error
            whole[output.role][output.name] = assemble(parts, shape, layout, self.mesh)
        step = Step(whole[OutputRole.OUTPUT], whole[OutputRole.GRADIENT], whole[OutputRole.BUFFER])
        return Results(step, [{output: result[i] for output, i in positions.items()} for result in results], apart)

    def given(self, nodes: Sequence[Node], seed: int = SEED) -> list[list[Tensor]]:
        """Return, per rank, its part of what each placeholder stands for."""
        values = self.inputs()
        return [[self._part(node, rank, values, seed) for node in nodes] for rank in range(self.mesh.size)]

    def run_split(self, split: Split) -> list[tuple[Tensor, ...]]:
        """Return, per rank, the results of a partitioned program: outputs and buffers, then gradients."""
        ends = run_ranks(split.forward, self.mesh, self.given(placeholders(split.forward.graph)))
        count = len(split.outputs)
        if split.backward is None:
            return ends
        tangents = self.given(placeholders(split.backward.graph)[-len(split.tangents) :] if split.tangents else ())
        saved = [(*end[count:], *tangent) for end, tangent in zip(ends, tangents, strict=True)]
        gradients = run_ranks(split.backward, self.mesh, saved)
        return [(*end[:count], *gradient) for end, gradient in zip(ends, gradients, strict=True)]

    def held_whole(self, what: Input) -> Tensor:
        """Return a parameter, buffer or constant of the model."""
        if what.role is InputRole.PARAMETER:
            return self.call.model.get_parameter(what.name).detach()
        constants = self.planned.captured.constants
        return constants[what.name] if what.name in constants else self.call.model.get_buffer(what.name)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter assembled from what the ranks hold."""
        value = self.planned.plan.parameters[name]
        parts = [held[Input(InputRole.PARAMETER, name)] for held in self.held]
        return assemble(parts, value.shape, value.layout, self.mesh)

    def inputs(self) -> dict[Input, Tensor]:
        """Return the arguments of the call, and the gradients that it is given, whole."""
        signature = self.planned.captured.signature
        tensors = signature.flatten(self.call.args, dict(self.call.kwargs))
        values = {Input(InputRole.INPUT, s.path): t.detach() for s, t in zip(signature.inputs, tensors, strict=True)}
        for node in placeholders(self.planned.graph.graph, InputRole.TANGENT):
            output = self.planned.plan.outputs[input_of(node).name]
            values[input_of(node)] = tangent(output.name, output.shape, tensor_of(node).dtype)
        return values

    def _part(self, node: Node, rank: int, values: Mapping[Input, Tensor], seed: int) -> Tensor:
        what, coordinate = input_of(node), self.mesh.coordinates()[rank]
        if what.role is InputRole.COORDINATE:
            return torch.tensor([coordinate[self.mesh.index(what.name)]], device="cpu")
        if what.role is InputRole.SEED:
            return torch.tensor(seed, device="cpu")
        if what in self.held[rank]:
            return self.held[rank][what]
        part, like = local_part(values[what], layout_of(node), self.mesh, coordinate), tensor_of(node)
        assert part.shape == like.shape, f"{what} is {list(part.shape)}, not {list(like.shape)}"
        return strided_like(part, like)

    def _laid_out(self, output: Output) -> tuple[Layout, tuple[int, ...]]:
        """Return layout and global shape: a gradient and a buffer's new value are laid out as what they belong to."""
        plan, name = self.planned.plan, output.name
        if output.role is OutputRole.BUFFER:
            layouts = {input_of(n).name: layout_of(n) for n in placeholders(self.planned.graph.graph, InputRole.BUFFER)}
            return layouts[name], tuple(self.call.model.get_buffer(name).shape)
        if output.role is OutputRole.OUTPUT:
            value = plan.outputs[name]
        else:
            value = plan.parameters[name] if name in plan.parameters else plan.inputs[name.removeprefix("input:")]
        return value.layout, value.shape


def _held(part: Tensor, node: Node) -> Tensor:
    """Return a copy of a part with the strides that ranks store it with."""
    like = tensor_of(node)
    return torch.empty_strided(part.shape, like.stride(), dtype=part.dtype, device=part.device).copy_(part)


class Whole:
    """Runs a program with global shapes on whole tensors: a reshard or collective does nothing there.

    `values` are of nodes; what is put in is taken as it is.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.given = ranks, ranks.inputs()
        self.values: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """Return what one device has; operands are computed before."""
        waiting = [node]
        while waiting:
            at = waiting[-1]
            missing = [value for value in at.all_input_nodes if value not in self.values]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if at not in self.values:
                self.values[at] = self._computed(at)
        return self.values[node]

    def _computed(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.given[input_of(node)] if input_of(node) in self.given else self.ranks.held_whole(input_of(node))
        args: Any
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.target is torch.ops.aten.view.default:
            return args[0].reshape(args[1])  # passes move views to where strides may forbid them; devices copy then
        assert callable(node.target)
        return node.target(*args, **kwargs)


def run_whole(gm: GraphModule, ranks: Ranks, drawn: Mapping[Node, Any] | None = None) -> Step:
    """Run one step of a program with global shapes, on one device; `drawn` are values of its random calls."""
    whole = Whole(ranks)
    whole.values.update(drawn or {})
    results: dict[OutputRole, dict[str, Tensor]] = {role: {} for role in OutputRole}
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        if isinstance(value, Node):
            results[output.role][output.name] = whole.value(value)
    return Step(results[OutputRole.OUTPUT], results[OutputRole.GRADIENT], results[OutputRole.BUFFER])


def tangent(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the gradient of what comes after the model, for its output `name`: a loss counts once."""
    if not shape:
        return torch.ones((), dtype=dtype, device="cpu")
    generator = torch.Generator("cpu").manual_seed(sum(name.encode()))
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator, device="cpu").to(dtype)


def run_on_one_device(call: Call, *, training: bool = True, inside: AbstractContextManager[None] | None = None) -> Step:
    """Run one step of the model itself, or one forward without `training`; `call` is left as it is.

    The step runs inside of `inside`.
    """
    model, args, kwargs = copy.deepcopy(call[:3], dict(copies_of_computed(call.model)))
    with inside or nullcontext():
        with torch.set_grad_enabled(training):
            found = _tensors(model(*args, **kwargs))
        outputs = {path: value for path, value in found.items() if call.outputs is None or path in call.outputs}
        outputs |= call.new_values.tensors(model)
        differentiable = {name: value for name, value in outputs.items() if value.requires_grad}
        if training and differentiable:
            tangents = [tangent(name, value.shape, value.dtype) for name, value in differentiable.items()]
            torch.autograd.backward(list(differentiable.values()), tangents)
    leaves: dict[str, Tensor] = dict(model.named_parameters())
    arguments = bind_call(inspect.signature(model.forward), args, dict(kwargs)).leaves
    leaves |= {
        f"input:{path}": value for path, value in arguments.items() if isinstance(value, Tensor) and value.is_leaf
    }
    return Step(
        {name: value.detach() for name, value in outputs.items()},
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        dict(model.named_buffers()),
    )


def _tensors(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by path; a bare one is `output`."""
    return {path or "output": leaf for path, leaf in flatten_pytree(output)[0] if isinstance(leaf, Tensor)}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference over that of `want`."""
    error, norm = distance(got, want), norm_of(want)
    return error / norm if norm else float("inf") if error else 0.0


def distance(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference.

    An infinity or nan is at no distance of itself, and infinitely far from all else, as is a tensor of another shape.
    """
    one, other = _reals(got), _reals(want)
    if one.shape != other.shape:
        return float("inf")
    alike = (one == other) | (one.isnan() & other.isnan())
    error = float(torch.where(alike, 0.0, one - other).norm())
    return float("inf") if error != error else error


def norm_of(tensor: Tensor) -> float:
    """Return the norm of what is finite of it."""
    numbers = _reals(tensor)
    return float(torch.where(numbers.isfinite(), numbers, 0.0).norm())


def _reals(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def copies_apart(parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> float:
    """Return how far ranks that hold the same part are apart: the largest relative error of a copy."""
    first: dict[tuple[int, ...], Tensor] = {}
    errors = [0.0]
    for coordinate, part in zip(mesh.coordinates(), parts, strict=True):
        pairs = zip(coordinate, layout.placements, strict=True)
        key = tuple(0 if isinstance(placement, Replicate) else at for at, placement in pairs)
        one = first.setdefault(key, part)
        if part is not one and not torch.equal(part, one):
            errors.append(relative_error(part, one))
    return max(errors)
