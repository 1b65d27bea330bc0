"""Build the program of a partitioned graph: its kernels and collectives as tasks, its values as buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, GraphModule, Node

from passes.cost.fused_regions import tensor_nbytes
from passes.cost.graph_buffers import values_of_graph
from passes.cost.graph_kernels import Kernel, kernels_of
from passes.cost.kernel_tasks import Pricing, task_of
from passes.cost.kernel_time import region_seconds
from passes.cost.optimizer_step import check_optimizer, update_of
from passes.cost.program import COMPUTE, Buffer, Program, Task
from passes.errors import UserError
from passes.ir.graph import (
    InputRole,
    Output,
    OutputRole,
    has_input,
    input_of,
    origin_of,
    outputs_of,
    returned,
    tensor_of,
)
from passes.ir.mesh import Mesh


def program_of(
    forward: GraphModule,
    backward: GraphModule | None,
    mesh: Mesh,
    *,
    outputs: Sequence[Output] = (),
    gradients: Sequence[Output] = (),
    optimizer: str | None = "adamw",
    fused: bool = True,
) -> Program:
    """Return the step of a partitioned LOCAL graph, priced on `mesh.hardware`.

    `outputs` and `gradients` name the results of the forward and the backward (`Split.outputs`, `Split.gradients`);
    without them, a result that the backward does not read is an output, and a gradient has the name of the module that
    computes it. `optimizer` ("adamw", "sgd" without momentum, None) updates each parameter with a gradient, in one pass
    over its state. With `fused`, the calls that Inductor fuses are one task, and values inside of it take no memory;
    otherwise, each call is a task, as in eager mode.

    Raises UserError for a mesh without hardware or an unknown optimizer.
    """
    step = _Step(_pricing(mesh, fused=fused))
    saved = [] if backward is None else [n for n in backward.graph.find_nodes(op="placeholder") if not _is_tangent(n)]
    results = returned(forward.graph)
    border = len(results) - len(saved)
    names = _add_graph(step, forward.graph, {}, backward=False)
    for position, value in enumerate(results):
        role = outputs[position].role if position < len(outputs) else OutputRole.OUTPUT
        if isinstance(value, Node):
            _keep(step, names[value], "activation" if position >= border else _KEPT.get(role, "temporary"))
    given_back = [v for v, o in zip(results, outputs, strict=False) if o.role is OutputRole.BUFFER]
    _copy_buffers(step, [name for value in given_back if isinstance(value, Node) for name in names[value]])
    updates: list[Task] = []
    if backward is not None:
        check_optimizer(optimizer)
        held = {
            placeholder: tuple(step.buffers[name] for name in names[value])
            for placeholder, value in zip(saved, results[border:], strict=True)
        }
        names = _add_graph(step, backward.graph, held, backward=True)
        for position, value in enumerate(returned(backward.graph)):
            if isinstance(value, Node):
                fqn = gradients[position].name if gradients else origin_of(value).fqn
                _keep(step, names[value], "gradient", fqn)
                updates += _updates(step, value, names[value], fqn, optimizer)
    return _program(step, updates)


def program_of_graph(gm: GraphModule, mesh: Mesh, *, fused: bool = True) -> Program:
    """Return the tasks of one graph of a partitioned program, by the roles of its inputs and results; no optimizer.

    Raises UserError for a mesh without hardware.
    """
    step = _Step(_pricing(mesh, fused=fused))
    results = tuple(zip(outputs_of(gm.graph), returned(gm.graph), strict=True))
    is_backward = any(output.role is OutputRole.GRADIENT for output, _ in results)
    names = _add_graph(step, gm.graph, {}, backward=is_backward)
    for output, value in results:
        if isinstance(value, Node):
            fqn = output.name if output.role is OutputRole.GRADIENT else ""
            _keep(step, names[value], _KEPT_BY_GRAPH.get(output.role, "temporary"), fqn)
    given_back = [value for output, value in results if output.role is OutputRole.BUFFER]
    _copy_buffers(step, [name for value in given_back if isinstance(value, Node) for name in names[value]])
    return _program(step, ())


_KEPT = {OutputRole.OUTPUT: "output"}
_KEPT_BY_GRAPH = _KEPT | {OutputRole.GRADIENT: "gradient", OutputRole.SAVED: "output"}  # to the end of the one graph


def _pricing(mesh: Mesh, *, fused: bool) -> Pricing:
    if mesh.hardware is None:
        raise UserError(
            f"mesh {mesh} does not say what its devices are, so nothing on it can be priced; name them, as in "
            f"Mesh('{mesh}', hardware='h100')"
        )
    return Pricing(mesh, mesh.hardware, fused)


def _is_tangent(node: Node) -> bool:
    return has_input(node) and input_of(node).role is InputRole.TANGENT


@dataclass
class _Step:
    """Collect the tasks and buffers of a step while its graphs are added, the forward first."""

    pricing: Pricing
    tasks: list[Task] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    from_parameters: set[str] = field(default_factory=set)  # names of buffers that are computed from parameters alone
    generated: set[str] = field(default_factory=set)  # names of tasks whose kernels Inductor writes: they may be moves


def _add_graph(
    step: _Step, graph: Graph, held: Mapping[Node, tuple[Buffer, ...]], *, backward: bool
) -> Mapping[Node, tuple[str, ...]]:
    """Add the tasks and buffers of a graph; return the names of its nodes' buffers.

    `held` are placeholders whose values an earlier graph has computed, with their buffers.
    """
    known = set(step.buffers) if backward else set[str]()  # there before the tangents are
    values = values_of_graph(graph, held, backward=backward)
    for name, (role, buffer) in values.inputs.items():
        step.buffers[name] = buffer
        if role in (InputRole.PARAMETER, InputRole.COORDINATE):
            step.from_parameters.add(name)
        if role is InputRole.SAVED:
            known.add(name)
    for kernel in kernels_of(graph, values, fused=step.pricing.fused):
        _add_kernel(step, kernel, values.names, values.sizes, known, backward=backward)
    return values.names


def _add_kernel(
    step: _Step,
    kernel: Kernel,
    names: Mapping[Node, tuple[str, ...]],
    sizes: Mapping[str, int],
    known: set[str],
    *,
    backward: bool,
) -> None:
    is_of_parameters = step.from_parameters.issuperset(kernel.reads) and not kernel.is_random
    is_known = is_of_parameters or all(name in known or name in step.from_parameters for name in kernel.reads)
    is_gathered = is_of_parameters and any(step.buffers[n].kind in ("parameter", "gathered") for n in kernel.reads)
    makers = {name: node for node in kernel.nodes for name in names[node]}
    for name in kernel.outputs:
        kind, maker = "gathered" if is_gathered else "temporary", makers[name]
        step.buffers[name] = Buffer(name, sizes[name], kind, origin_of(maker).fqn, maker.name, backward)
    if is_of_parameters:
        step.from_parameters.update(kernel.outputs)
    if is_known:
        known.update(kernel.outputs)
    task = task_of(kernel, step.pricing, backward=backward, prefetchable=is_known)
    step.tasks.append(task)
    if kernel.is_generated:
        step.generated.add(task.name)


def _keep(step: _Step, names: Iterable[str], kind: str, fqn: str = "") -> None:
    """Set the kind of a result: an output, a gradient, or a value for the backward."""
    for name in names:
        buffer = step.buffers[name]
        if buffer.kind == "temporary" or (buffer.kind == "gathered" and kind != "activation"):
            step.buffers[name] = replace(buffer, kind=kind, fqn=fqn or buffer.fqn)


def _copy_buffers(step: _Step, names: Sequence[str]) -> None:
    """Add the copy of new values into the model's buffers, which the runtime makes when the forward has ended."""
    if names:
        moved = 2 * sum(step.buffers[name].nbytes for name in names)
        seconds = region_seconds(0.0, moved, step.pricing.hardware)
        step.tasks.append(Task("buffers", "compute", COMPUTE, seconds, tuple(names), nbytes=moved))


def _updates(step: _Step, gradient: Node, names: tuple[str, ...], fqn: str, optimizer: str | None) -> list[Task]:
    """Return the update for a parameter's gradient; none for the gradient of an input."""
    if optimizer is None or fqn.startswith("input:") or not names:
        return []
    parameter = f"{InputRole.PARAMETER.value}.{fqn}"
    known = parameter if parameter in step.buffers else ""
    nbytes = tensor_nbytes(tensor_of(gradient))
    task, state = update_of(names, known, fqn, nbytes, optimizer, step.pricing.hardware)
    if state is not None:
        step.buffers[state.name] = state
    return [task]


def _program(step: _Step, updates: Sequence[Task]) -> Program:
    tasks = _with_deferrable(step.tasks, step.buffers, step.generated)
    return Program((*tasks, *updates), tuple(step.buffers.values()), step.pricing.mesh)


def _with_deferrable(tasks: list[Task], buffers: Mapping[str, Buffer], generated: set[str]) -> list[Task]:
    """Mark collectives that lead to results of the program only through moves, casts and collectives.

    A move may read what is known from the start as well: the end of padding reads the rank's coordinate.
    """
    made = {name for task in tasks for name in task.outputs}
    readers: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        for name in task.inputs:
            readers.setdefault(name, []).append(number)
    leads_out = [False] * len(tasks)  # per task, whether only such a way leads from what it reads
    found = list(tasks)
    for number, task in reversed(list(enumerate(tasks))):
        is_used = all(buffers[name].kind in ("gradient", "output") or readers.get(name) for name in task.outputs)
        ends = is_used and all(leads_out[reader] for name in task.outputs for reader in readers.get(name, ()))
        leads_out[number] = ends and len(made.intersection(task.inputs)) == 1 and (task.is_collective or task.name in generated)
        if ends and task.is_collective and not task.prefetchable:
            found[number] = replace(task, deferrable=True)
    return found
