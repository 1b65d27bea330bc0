"""Compare predicted and measured times of each collective and each module of a step, on the mesh that it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from autoshard.capture.signature import Call
from autoshard.compile.compiled import Program as Compiled
from autoshard.measure.fit_hardware import LONG, ProductTime, TransferTime, fit_links, fit_products
from autoshard.plans.collectives import Collective
from autoshard.plans.names import fold_names
from autoshard.runtime.agreement import exchange
from autoshard.runtime.execution import Execution
from autoshard.runtime.process_groups import MeshGroups
from passes._torch import SEND, flatten_pytree
from passes.cost.build_program import program_of
from passes.cost.kernel_time import Product
from passes.cost.program import Program, Task
from passes.cost.simulate import simulate
from passes.errors import UserError
from passes.hardware.hardware import Hardware
from passes.ir.graph import operands, tensor_of
from passes.ir.matmul_chunks.one_operator import OPERATORS
from passes.ir.mesh import Mesh
from passes.ir.text import DTYPE_NAMES
from passes.ir.units import format_bytes, format_seconds

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

ROUNDS = 3  # repetitions, of which the fastest counts: other processes only add time
APART = 4  # ratio of largest to smallest message, in bytes, from which both latency and bandwidth can be fitted
MODULES = 3  # kinds of modules that a line of the table names, so that it stays one line
OUTSIDE = "(model)"  # name for calls outside of all modules


@dataclass(frozen=True)
class CollectiveTime:
    """A message of the step: the plan's collectives that it carries, and seconds on the slowest rank, with nothing
    concurrent.
    """

    name: str  # of its node
    kind: str
    axes: tuple[str, ...]
    nbytes: int  # of its larger side, per rank
    backward: bool
    runs: tuple[Collective, ...]
    predicted: float
    measured: float


@dataclass(frozen=True)
class RegionTime:
    """The computation of one module in one direction, call by call, on the slowest rank."""

    fqn: str
    backward: bool
    calls: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Profile:
    """Result of `model.profile(...)`.

    `step` is one forward and backward in seconds, with all overlap; `hardware` are the figures with which the
    predictions would have been nearest.
    """

    mesh: Mesh
    predicted_step: float
    step: float
    collectives: tuple[CollectiveTime, ...]
    regions: tuple[RegionTime, ...]
    hardware: Hardware

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def profile(
    execution: Execution, groups: MeshGroups, call: Call, seed: torch.Tensor, *, fused: bool
) -> Profile:
    """Run one call of a model and its backward, call by call and as a whole. All ranks of the mesh call it together.

    `fused` says that the program was compiled, so that its step runs fused kernels.

    Parameters, their gradients and buffers are not changed. Raises UserError if the hardware's figures are unknown.
    """
    mesh = execution.local.plan.mesh
    if mesh.hardware is None:
        raise UserError(
            "a profile compares with what is predicted, and the figures of this device are not known: give "
            "Options(hardware='h100') or another preset, or measure it with `python -m autoshard calibrate`"
        )
    split = execution.program.split

    def program(*, fused: bool) -> Program:
        return program_of(
            split.forward,
            split.backward,
            mesh,
            outputs=split.outputs,
            gradients=split.gradients,
            optimizer=None,
            fused=fused,
        )

    device = execution.place.device
    watch = _Watch(groups, device)
    timed = Compiled(split, watch.code(split.forward, "forward"), split.backward and watch.code(split.backward, "backward"))
    for _ in range(ROUNDS):
        _step(replace(execution, program=timed), call, seed)
    seconds = _slowest(groups, watch.least)
    whole = min(_slowest(groups, {"step": _whole(execution, groups, call, seed)})["step"] for _ in range(ROUNDS))
    tasks = program(fused=False).tasks
    known = {one.id: one for one in execution.local.plan.collectives}
    collectives = tuple(_collectives(tasks, seconds, known))
    hardware = _recalibrated(mesh, mesh.hardware, collectives, _products(split.forward, split.backward, seconds))
    predicted = simulate(program(fused=fused)).step_time
    return Profile(mesh, predicted, whole, collectives, tuple(_regions(tasks, seconds)), hardware)


class _Watch:
    """Timer of graphs call by call; all ranks synchronize before a collective, which is awaited at once."""

    def __init__(self, groups: MeshGroups, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.least: dict[str, float] = {}  # "forward.mm_1" -> seconds

    def code(self, gm: GraphModule, name: str) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
        def run(inputs: list[torch.Tensor]) -> Sequence[Any]:
            given = list(inputs)
            inputs.clear()
            results: Sequence[Any] = _Clocked(gm, name, self).run(*given, enable_io_processing=False)
            return results

        return run

    def time(self, key: str, call: Callable[[], Any], *, together: bool) -> Any:
        if together:
            exchange(self.groups, None)
        self._finish()
        began = time.perf_counter()
        result = call()
        self._finish()
        seconds = time.perf_counter() - began
        self.least[key] = min(seconds, self.least.get(key, seconds))
        return result

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Clocked(Interpreter):
    def __init__(self, gm: GraphModule, name: str, watch: _Watch) -> None:
        super().__init__(gm)
        self.name, self.watch = name, watch

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        together = _is_collective(n)

        def call() -> Any:
            result = super(_Clocked, self).run_node(n)
            if together and n.target not in OPERATORS:
                for one in result if isinstance(result, list | tuple) else (result,):
                    c10d.wait_tensor(one)
            return result

        return self.watch.time(f"{self.name}.{n.name}", call, together=together)


def _is_collective(node: Node) -> bool:
    is_collective = str(node.target).startswith("_c10d_functional") and node.target is not c10d.wait_tensor.default
    return is_collective or node.target is SEND or node.target in OPERATORS


def _step(execution: Execution, call: Call, seed: torch.Tensor) -> None:
    """Run a forward, and its backward (if any) with gradients of ones; buffers get their old values back."""
    buffers = [slot if isinstance(slot, torch.Tensor) else slot.read() for slot in execution.buffers.values()]
    old = [buffer.clone() for buffer in buffers]
    outputs, _ = flatten_pytree(execution.run(call, seed))
    differentiable = [one for _, one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    parameters = [execution.parameters[name].slot.read() for name in execution.parameter_names]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if differentiable and trainable:
        tangents = [torch.ones_like(one) for one in differentiable]
        torch.autograd.grad(differentiable, trainable, tangents, allow_unused=True)
    with torch.no_grad():
        for buffer, value in zip(buffers, old, strict=True):
            buffer.copy_(value)


def _whole(
    execution: Execution, groups: MeshGroups, call: Call, seed: torch.Tensor
) -> float:
    watch = _Watch(groups, execution.place.device)
    watch.time("step", lambda: _step(execution, call, seed), together=True)
    return watch.least["step"]


def _slowest(groups: MeshGroups, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each time on the rank where it took longest."""
    everywhere = exchange(groups, dict(seconds))
    return {key: max(one[key] for one in everywhere) for key in seconds}


def _key(task: Task) -> Iterator[str]:
    """Return the keys of the timed calls that a task stands for."""
    return (f"{'backward' if task.backward else 'forward'}.{name}" for name in task.nodes)


def _collectives(
    tasks: Sequence[Task], seconds: Mapping[str, float], known: Mapping[str, Collective]
) -> Iterator[CollectiveTime]:
    for task in tasks:
        if task.is_collective:
            measured = sum(seconds[key] for key in _key(task))
            runs = tuple(known[step] for step in task.steps if step in known)
            yield CollectiveTime(
                task.nodes[-1], task.kind, task.axes, task.nbytes, task.backward, runs, task.seconds, measured
            )


def _regions(tasks: Sequence[Task], seconds: Mapping[str, float]) -> Iterator[RegionTime]:
    groups: dict[tuple[bool, str], list[Task]] = {}
    for task in tasks:
        if not task.is_collective and task.nodes:
            groups.setdefault((task.backward, task.fqn or OUTSIDE), []).append(task)
    for (backward, fqn), own in groups.items():
        measured = sum(seconds[key] for task in own for key in _key(task))
        yield RegionTime(fqn, backward, len(own), sum(task.seconds for task in own), measured)


def _products(
    forward: GraphModule, backward: GraphModule | None, seconds: Mapping[str, float]
) -> Iterator[ProductTime]:
    for name, gm in (("forward", forward), ("backward", backward)):
        for node in gm.graph.nodes if gm is not None else ():
            if node.target is aten.mm.default:
                left, right = (tensor_of(value) for value in operands(node))
                shape = Product(1, left.shape[0], right.shape[1], left.shape[1])
                yield ProductTime(shape, DTYPE_NAMES[left.dtype], left.element_size(), seconds[f"{name}.{node.name}"])


def _recalibrated(
    mesh: Mesh, hardware: Hardware, collectives: Sequence[CollectiveTime], products: Iterator[ProductTime]
) -> Hardware:
    """Return the hardware's figures that fit the measurements.

    Used are products that took more than a launch, and links with messages of quite different sizes. Other figures do
    not change.
    """
    if measured := tuple(one for one in products if one.seconds > LONG * hardware.launch):
        hardware = fit_products(hardware, measured)
    times = [TransferTime(c.kind, c.axes, mesh.group_shape(c.axes), c.nbytes, c.measured) for c in collectives]
    sizes: dict[object, set[int]] = {}
    for one in times:
        sizes.setdefault((one.kind, one.group), set()).add(one.nbytes)
    useful = [one for one in times if max(sizes[one.kind, one.group]) >= APART * min(sizes[one.kind, one.group])]
    hardware = fit_links(hardware, useful)
    by = f"measured by a profile on {mesh} with torch {torch.__version__}"
    own = {"flops": by} if measured else {}
    own |= {"across" if one.group.nodes > 1 else "inside": by for one in useful}
    return replace(hardware, sources=tuple((dict(hardware.sources) | own).items()))


# --- text


def _lines(one: Profile) -> Iterator[str]:
    yield f"profile on {one.mesh.size} ranks ({one.mesh}); each call alone and not fused, on the slowest rank"
    rows = [("", "", "", "predicted", "measured", "ratio")]
    rows.append(("step, as it runs", "", "", *_times(one.predicted_step, one.step)))
    groups: dict[tuple[object, ...], list[CollectiveTime]] = {}
    for message in one.collectives:
        groups.setdefault((message.kind, message.axes, message.backward, message.nbytes), []).append(message)
    for same in groups.values():
        first = same[0]
        modules = dict.fromkeys(run.origin.fqn for c in same for run in c.runs if run.origin.fqn)
        where = _where(modules)
        count = f"{len(same)} x " if len(same) > 1 else ""
        what = f"{count}{first.kind} over {', '.join(first.axes)}, {format_bytes(first.nbytes)}"
        times = sum(c.predicted for c in same), sum(c.measured for c in same)
        rows.append((what, _way(first), where, *_times(*times)))
    regions: dict[tuple[object, ...], list[RegionTime]] = {}
    for region in one.regions:
        regions.setdefault((region.backward, *(p for p in region.fqn.split(".") if not p.isdecimal())), []).append(region)
    for some in regions.values():
        calls = f"compute, {sum(region.calls for region in some)} calls"
        where = _where(dict.fromkeys(region.fqn for region in some))
        times = sum(region.predicted for region in some), sum(region.measured for region in some)
        rows.append((calls, _way(some[0]), where, *_times(*times)))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        yield "  ".join(cells).rstrip()
    if one.hardware == one.mesh.hardware:
        yield "not recalibrated: products and messages are too small or too alike to tell of the hardware"
    else:
        yield f"recalibrated: {_figures(one.hardware)}"


def _where(modules: Iterable[str]) -> str:
    folded = fold_names(modules).split(", ")
    return ", ".join([*folded[:MODULES], *(["..."] if len(folded) > MODULES else [])])


def _way(one: CollectiveTime | RegionTime) -> str:
    return "backward" if one.backward else "forward"


def _times(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted else "-"
    return format_seconds(predicted), format_seconds(measured), ratio


def _figures(hardware: Hardware) -> str:
    rates = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in hardware.flops)
    link = hardware.inside
    return f"{rates}; inside {format_bytes(link.bandwidth)}/s, {format_seconds(link.latency)} a step"
