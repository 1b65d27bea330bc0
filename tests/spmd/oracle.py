"""One training step of a model on all ranks of a mesh, in one process, and the same step on one device.

The ranks run the program that autoshard makes; the device runs the model itself under PyTorch's autograd, so that
capture is checked with the rest.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoshard.compile import Split
from autoshard.options import Options
from autoshard.planner import Planned, make_plan
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    input_of,
    layout_of,
    outputs_of,
    placeholders,
    tensor_of,
)
from passes.ir.layout import Layout, Replicate, assemble, local_part
from passes.ir.mesh import Mesh
from passes.ranks import run_ranks
from tests.models import Case

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative to a tensor's norm
SEED = 1234  # of the random numbers of a step
NOISE = 1e-5  # of the largest norm of its kind: what is smaller is zero but for rounding, and measured by this


@dataclass(frozen=True)
class Step:
    """What one step gives, all of it global: tensors by path or FQN. Gradients that are None are left out."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]  # of parameters by FQN, of inputs by "input:<path>"
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Results:
    """A step assembled, and what each rank had of it."""

    step: Step
    parts: Sequence[Mapping[Output, Tensor]]


@dataclass(frozen=True)
class Ranks:
    """A planned case on simulated ranks; `held` are each rank's parameters, buffers and constants."""

    case: Case
    mesh: Mesh
    planned: Planned
    held: Sequence[dict[Input, Tensor]]

    def run(self, seed: int = SEED) -> Results:
        """One step, or one forward where the program is no more; what the ranks hold stays as it is."""
        results = run_ranks(self.planned.graph, self.mesh, self.given(placeholders(self.planned.graph.graph), seed))
        positions = {o: i for i, o in enumerate(outputs_of(self.planned.graph.graph)) if results[0][i] is not None}
        whole: dict[OutputRole, dict[str, Tensor]] = {role: {} for role in OutputRole}
        for output, position in positions.items():
            parts = [result[position] for result in results]
            layout, shape = self._laid_out(output)
            _check_copies(output.name, parts, layout, self.mesh)
            whole[output.role][output.name] = assemble(parts, shape, layout, self.mesh)
        step = Step(whole[OutputRole.OUTPUT], whole[OutputRole.GRADIENT], whole[OutputRole.BUFFER])
        return Results(step, [{output: result[i] for output, i in positions.items()} for result in results])

    def given(self, nodes: Sequence[Node], seed: int = SEED) -> list[list[Tensor]]:
        """Per rank, its part of what each placeholder stands for."""
        values = self._inputs()
        return [[self._part(node, rank, values, seed) for node in nodes] for rank in range(self.mesh.size)]

    def run_split(self, split: Split) -> list[tuple[Tensor, ...]]:
        """Per rank, the results of a partitioned program: outputs and buffers, then gradients."""
        ends = run_ranks(split.forward, self.mesh, self.given(placeholders(split.forward.graph)))
        count = len(split.outputs)
        if split.backward is None:
            return ends
        tangents = self.given(placeholders(split.backward.graph)[-len(split.tangents) :] if split.tangents else ())
        saved = [(*end[count:], *tangent) for end, tangent in zip(ends, tangents, strict=True)]
        gradients = run_ranks(split.backward, self.mesh, saved)
        return [(*end[:count], *gradient) for end, gradient in zip(ends, gradients, strict=True)]

    def parameter(self, name: str) -> Tensor:
        """A parameter assembled from what the ranks hold."""
        value = self.planned.plan.parameters[name]
        parts = [held[Input(InputRole.PARAMETER, name)] for held in self.held]
        return assemble(parts, value.shape, value.layout, self.mesh)

    def _inputs(self) -> dict[Input, Tensor]:
        signature = self.planned.captured.signature
        tensors = signature.flatten(self.case.args, self.case.kwargs)
        values = {Input(InputRole.INPUT, s.path): t.detach() for s, t in zip(signature.inputs, tensors, strict=True)}
        for node in placeholders(self.planned.graph.graph, InputRole.TANGENT):
            output = self.planned.plan.outputs[input_of(node).name]
            values[input_of(node)] = tangent(output.name, output.shape, tensor_of(node).dtype)
        return values

    def _part(self, node: Node, rank: int, values: Mapping[Input, Tensor], seed: int) -> Tensor:
        what, coordinate = input_of(node), self.mesh.coordinates()[rank]
        if what.role is InputRole.COORDINATE:
            return torch.tensor([coordinate[self.mesh.index(what.name)]])
        if what.role is InputRole.SEED:
            return torch.tensor(seed)
        if what in self.held[rank]:
            return self.held[rank][what]
        part = local_part(values[what], layout_of(node), self.mesh, coordinate).contiguous()
        assert part.shape == tensor_of(node).shape, f"{what} is {list(part.shape)}, not {list(tensor_of(node).shape)}"
        return part

    def _laid_out(self, output: Output) -> tuple[Layout, tuple[int, ...]]:
        """Layout and global shape: a gradient and a buffer's new value are laid out as what they belong to."""
        plan, name = self.planned.plan, output.name
        if output.role is OutputRole.BUFFER:
            layouts = {input_of(n).name: layout_of(n) for n in placeholders(self.planned.graph.graph, InputRole.BUFFER)}
            return layouts[name], tuple(self.case.model.get_buffer(name).shape)
        if output.role is OutputRole.OUTPUT:
            value = plan.outputs[name]
        else:
            value = plan.parameters[name] if name in plan.parameters else plan.inputs[name.removeprefix("input:")]
        return value.layout, value.shape


def tangent(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The gradient of what comes behind the model, for its output `name`: a loss counts once."""
    if not shape:
        return torch.ones((), dtype=dtype)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator).to(dtype)


def plan_ranks(case: Case, mesh: str | Mesh, options: Options | None = None, *, training: bool = True) -> Ranks:
    """Plan `case` for simulated ranks, each with its part of the parameters and buffers."""
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    planned = make_plan(case.model, case.args, case.kwargs, mesh, options or Options(), training=training)
    whole = {Input(InputRole.PARAMETER, name): p.detach() for name, p in case.model.named_parameters()}
    whole |= {Input(InputRole.BUFFER, name): b for name, b in case.model.named_buffers()}
    whole |= {Input(InputRole.BUFFER, name): constant for name, constant in planned.captured.constants.items()}
    nodes = [node for node in placeholders(planned.graph.graph) if input_of(node) in whole]
    held = [
        {input_of(node): local_part(whole[input_of(node)], layout_of(node), mesh, at).clone() for node in nodes}
        for at in mesh.coordinates()
    ]
    return Ranks(case, mesh, planned, held)


def run_on_ranks(case: Case, mesh: str | Mesh, options: Options | None = None, *, training: bool = True) -> Step:
    """One step of `case` on simulated ranks, or one forward without `training`."""
    return plan_ranks(case, mesh, options, training=training).run().step


def run_on_one_device(case: Case, *, training: bool = True) -> Step:
    """One step of the model itself, or one forward without `training`; `case` is left as it is."""
    model, args, kwargs = copy.deepcopy(case)
    with torch.set_grad_enabled(training):
        outputs = dict(_tensors(model(*args, **kwargs)))
    differentiable = {name: value for name, value in outputs.items() if value.requires_grad}
    if differentiable:
        tangents = [tangent(name, value.shape, value.dtype) for name, value in differentiable.items()]
        torch.autograd.backward(list(differentiable.values()), tangents)
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    leaves = dict(model.named_parameters())
    leaves |= {f"input:{name}": value for name, value in arguments.items() if isinstance(value, Tensor)}
    return Step(
        {name: value.detach() for name, value in outputs.items()},
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        dict(model.named_buffers()),
    )


def _tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model's output by path; a bare one is `output`."""
    if isinstance(output, Tensor):
        yield path or "output", output
    elif isinstance(output, dict | tuple | list):
        for key, value in output.items() if isinstance(output, dict) else enumerate(output):
            yield from _tensors(value, f"{path}.{key}" if path else str(key))


def check_step(case: Case, mesh: str | Mesh, options: Options | None = None) -> Ranks:
    """One step of `case` on `mesh` equals that on one device. Gives the ranks, to ask more of them."""
    ranks = plan_ranks(case, mesh, options)
    dtype = next(case.model.parameters()).dtype
    compare(ranks.run().step, run_on_one_device(case), TOLERANCE[dtype])
    return ranks


def compare(got: Step, want: Step, tolerance: float) -> None:
    """Raises AssertionError that names every tensor that is off by more than `tolerance`, relative to its norm."""
    changed = {name: want.buffers[name] for name in got.buffers}
    wrong = [
        *_differences("output", got.outputs, want.outputs, tolerance),
        *_differences("gradient", got.gradients, want.gradients, tolerance),
        *_differences("buffer", got.buffers, changed, tolerance),
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def _differences(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> Iterator[str]:
    if got.keys() != want.keys():
        yield f"{what}s on one side only: {sorted(got.keys() ^ want.keys())}"
        return
    largest = max((_norm(tensor) for tensor in want.values() if tensor.is_floating_point()), default=0.0)
    for name, tensor in want.items():
        if got[name].shape != tensor.shape or got[name].dtype != tensor.dtype:
            yield f"{what} {name}: {got[name].dtype}{list(got[name].shape)}, not {tensor.dtype}{list(tensor.shape)}"
        elif not tensor.is_floating_point():
            if not torch.equal(got[name], tensor):
                yield f"{what} {name} differs"
        elif (error := relative_error(got[name], tensor, NOISE * largest)) > tolerance:
            yield f"{what} {name} is off by {error:.1e}"


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference over that of `want`, or over `floor` if that is larger; nan counts as infinite."""
    error, scale = _norm(got.double() - want.double()), max(_norm(want), floor)
    if error != error:
        return float("inf")
    return error / scale if error else 0.0


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def _check_copies(name: str, parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> None:
    """Ranks that hold the same part hold the same bits."""
    first: dict[tuple[int, ...], Tensor] = {}
    for coordinate, part in zip(mesh.coordinates(), parts, strict=True):
        pairs = zip(coordinate, layout.placements, strict=True)
        key = tuple(0 if isinstance(placement, Replicate) else at for at, placement in pairs)
        assert torch.equal(first.setdefault(key, part), part), f"{name} differs between ranks that hold the same part"
