"""From the per-device graphs of a partitioned program to tasks and buffers with their seconds and bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload
from passes.cost.collective_time import collective_seconds, link_of
from passes.cost.fused_regions import bytes_read, is_alias, is_fusible, is_reduction, regions
from passes.cost.kernel_time import kernel_flops, kernel_seconds, region_seconds
from passes.cost.pipelined_matmul_time import pipelined
from passes.cost.program import COMPUTE, OPTIMIZER, Buffer, Program, Task
from passes.errors import UserError
from passes.hardware.hardware import Hardware
from passes.ir.collectives import Kind, kind_of_op
from passes.ir.graph import (
    InputRole,
    Output,
    OutputRole,
    has_input,
    input_of,
    operands,
    origin_of,
    outputs_of,
    results_of,
    returned,
    tensor_of,
    transfer_of,
    value_of,
)
from passes.ir.matmul_chunks.one_operator import OPERATORS
from passes.ir.mesh import Mesh
from passes.ir.text import DTYPE_NAMES
from passes.rules.rule import call_of


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
    """The step that a partitioned LOCAL graph makes, priced on `mesh.hardware`.

    `outputs` and `gradients` say what the forward and the backward return (`Split.outputs`, `Split.gradients`);
    without them, what the backward does not take is an output, and a gradient has the name of the module that made
    it. `optimizer` ("adamw", "sgd" without momentum, None) updates what has a gradient, in one pass over its state.
    With `fused`, what Inductor makes one kernel is one task, and what stays inside it is no memory; without, each
    call is a task, as in eager mode.

    Raises UserError for a mesh without hardware or an unknown optimizer.
    """
    builder = _Builder(mesh, _hardware_of(mesh), fused)
    saved = [] if backward is None else [n for n in backward.graph.find_nodes(op="placeholder") if not _is_tangent(n)]
    results = returned(forward.graph)
    border = len(results) - len(saved)
    builder.add(forward.graph, {}, backward=False)
    for position, value in enumerate(results):
        role = outputs[position].role if position < len(outputs) else OutputRole.OUTPUT
        if isinstance(value, Node):
            builder.keep(value, "activation" if position >= border else _KEPT.get(role, "temporary"))
    builder.return_buffers([v for v, o in zip(results, outputs, strict=False) if o.role is OutputRole.BUFFER])
    if backward is not None:
        builder.add(backward.graph, dict(zip(saved, results[border:], strict=True)), backward=True)
        for position, value in enumerate(returned(backward.graph)):
            if isinstance(value, Node):
                fqn = gradients[position].name if gradients else origin_of(value).fqn
                builder.keep(value, "gradient", fqn)
                builder.update(value, fqn, optimizer)
    return builder.program()


def program_of_graph(gm: GraphModule, mesh: Mesh, *, fused: bool = True) -> Program:
    """The tasks of one graph of a partitioned program, by the roles of its inputs and results; no optimizer.

    Raises UserError for a mesh without hardware.
    """
    builder = _Builder(mesh, _hardware_of(mesh), fused)
    results = tuple(zip(outputs_of(gm.graph), returned(gm.graph), strict=True))
    builder.add(gm.graph, {}, backward=any(output.role is OutputRole.GRADIENT for output, _ in results))
    for output, value in results:
        if isinstance(value, Node):
            fqn = output.name if output.role is OutputRole.GRADIENT else ""
            builder.keep(value, _STAYS.get(output.role, "temporary"), fqn)
    builder.return_buffers([value for output, value in results if output.role is OutputRole.BUFFER])
    return builder.program()


REORDERED_WEIGHTS = 4  # that a convolution's backward holds: measured with oneDNN on CPU, tests/cost/test_memory.py
MAX_READS = 4  # that a value read by several kernels may cost each: torch._inductor.config.realize_reads_threshold

_KEPT = {OutputRole.OUTPUT: "output"}
_STAYS = _KEPT | {OutputRole.GRADIENT: "gradient", OutputRole.SAVED: "output"}  # to the end of a graph by itself
OPTIMIZER_STATES: dict[str | None, int] = {"adamw": 2, "sgd": 0, None: 0}  # of a parameter's size, each


def _hardware_of(mesh: Mesh) -> Hardware:
    if mesh.hardware is None:
        raise UserError(
            f"mesh {mesh} does not say what its devices are, so nothing on it can be priced; name them, as in "
            f"Mesh('{mesh}', hardware='h100')"
        )
    return mesh.hardware


def _is_tangent(node: Node) -> bool:
    return has_input(node) and input_of(node).role is InputRole.TANGENT


@dataclass
class _Values:
    """Where the values of one graph are: the names of each node's buffers, and what is known of each buffer."""

    names: dict[Node, tuple[str, ...]] = field(default_factory=dict)  # views have the names of what they view
    readers: dict[str, list[Node]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    inlined: dict[str, dict[str, int]] = field(default_factory=dict)  # what a reader reads instead, and bytes of it
    needed: set[str] = field(default_factory=set)  # read by another kernel than makes it


_Kernel = tuple[tuple[Node, ...], dict[str, int]]  # its calls, and the bytes that it reads by buffer


class _Builder:
    """Collects the tasks and buffers of a forward, then of its backward."""

    def __init__(self, mesh: Mesh, hardware: Hardware, fused: bool) -> None:
        self.mesh, self.hardware, self.fused = mesh, hardware, fused
        self.tasks: list[Task] = []
        self.updates: list[Task] = []
        self.buffers: dict[str, Buffer] = {}
        self.early: set[str] = set()  # buffers that parameters alone give
        self.known: set[str] = set()  # buffers that are there before the tangents
        self.moves: set[str] = set()  # tasks of fusible calls
        self.names: dict[Node, tuple[str, ...]] = {}
        self.backward = False
        self.values = _Values()

    def add(self, graph: Graph, held: dict[Node, Any], *, backward: bool) -> None:
        """The tasks of a graph. `held` are its placeholders that an earlier graph's values come in by."""
        self.backward = backward
        self.known = set(self.buffers) if backward else set()
        self.values = values = self._values(graph, held)
        self.names |= values.names
        if self.fused:
            self._inline(graph)
        kernels = self._side_by_side([(group, self._reads(group)) for group in self._groups(graph)])
        values.needed = {name for value in graph.output_node().all_input_nodes for name in values.names[value]}
        values.needed.update(name for _, reads in kernels for name in reads)
        for group, reads in kernels:
            self._emit(group, reads)

    def _values(self, graph: Graph, held: dict[Node, Any]) -> _Values:
        values = _Values()
        for node in graph.nodes:
            if node.op == "placeholder":
                values.names[node] = self.names[held[node]] if node in held else self._input(node)
                continue
            for operand in operands(node):
                for name in values.names[operand]:
                    if viewed_by(node) is None:
                        values.readers.setdefault(name, []).append(node)
            if node.op != "output":
                values.names[node] = self._names(node, values)
        return values

    def _names(self, node: Node, values: _Values) -> tuple[str, ...]:
        source = viewed_by(node)
        if source is not None and node.target is operator.getitem:
            position = _position(source, node.args[1])
            names = values.names[source]
            return () if position is None else (names[position] if len(names) > 1 else names[0],)
        if source is not None:
            return values.names[source][:1]
        made = results_of(node)
        stem = f"backward.{node.name}" if self.backward else node.name
        names = tuple(f"{stem}.{number}" if number else stem for number in range(len(made)))
        values.sizes |= {name: _nbytes(tensor) for name, tensor in zip(names, made, strict=True)}
        return names

    def _input(self, node: Node) -> tuple[str, ...]:
        if not isinstance(value_of(node), torch.Tensor):
            return ()
        given = input_of(node)
        kind = _INPUT_KINDS[given.role]
        name = f"{given.role.value}.{given.name}"
        is_saved = given.role is InputRole.SAVED
        fqn = given.name if kind in ("parameter", "buffer") else origin_of(node).fqn if is_saved else ""
        self.buffers[name] = Buffer(name, _nbytes(value_of(node)), kind, fqn, node.name, self.backward and not is_saved)
        if given.role in (InputRole.PARAMETER, InputRole.COORDINATE):
            self.early.add(name)
        if is_saved:
            self.known.add(name)
        return (name,)

    def _groups(self, graph: Graph) -> list[tuple[Node, ...]]:
        """What runs as one kernel, in an order in which it can run: nodes that make values."""
        calls = [(node,) for node in graph.nodes if node.op == "call_function"]
        groups = regions(graph) if self.fused else calls
        made = (tuple(node for node in group if viewed_by(node) is None) for group in groups)
        inlined = self.values.inlined
        return [g for g in made if not all(name in inlined for node in g for name in self.values.names[node])]

    def _inline(self, graph: Graph) -> None:
        """Find values that are never in memory: each kernel that reads one makes it again."""
        values = self.values
        for node in graph.nodes:
            if node.op != "call_function" or not is_fusible(node.target) or is_reduction(node.target):
                continue
            readers = [reader for name in values.names[node] for reader in values.readers.get(name, ())]
            is_met = any(reader.op == "output" or not is_fusible(reader.target) for reader in readers)
            if not is_met and not _is_random(node) and len(reads := self._reads((node,))) <= MAX_READS:
                values.inlined |= {name: reads for name in values.names[node]}

    def _side_by_side(self, kernels: list[_Kernel]) -> list[_Kernel]:
        """Neighbours that loop over the same elements and read the same of them are one kernel."""
        found: list[_Kernel] = []
        for group, reads in kernels:
            if self.fused and found and self._is_one_loop(*found[-1], group, reads):
                group = (*found.pop()[0], *group)
                reads = self._reads(group)
            found.append((group, reads))
        return found

    def _is_one_loop(
        self, group: tuple[Node, ...], reads: dict[str, int], other: tuple[Node, ...], other_reads: dict[str, int]
    ) -> bool:
        if not all(is_fusible(node.target) and not is_reduction(node.target) for node in (*group, *other)):
            return False
        elements = [{math.prod(tensor.shape) for tensor in results_of(nodes[-1])} for nodes in (group, other)]
        made = {name for node in group for name in self.values.names[node]}
        shared = [self._size(name) for name in reads if name in other_reads]
        return elements[0] == elements[1] and made.isdisjoint(other_reads) and max(shared, default=0) >= min(
            self._size(name) for node in group for name in self.values.names[node]
        )

    def _reads(self, group: tuple[Node, ...]) -> dict[str, int]:
        """Names of the buffers that a kernel reads, and how many bytes of each."""
        values = self.values
        made = {name for node in group for name in values.names[node]}
        parts: dict[str, dict[object, int]] = {}  # by buffer, by what it is read through
        for node in group:
            for operand in operands(node):
                for name in values.names[operand]:
                    if name in values.inlined and name not in made:
                        for source, nbytes in values.inlined[name].items():
                            parts.setdefault(source, {})[name] = nbytes
                    elif name not in made:
                        parts.setdefault(name, {})[operand] = bytes_read(node, operand)
        return {name: min(self._size(name), sum(read.values())) for name, read in parts.items()}

    def _size(self, name: str) -> int:
        return self.buffers[name].nbytes if name in self.buffers else self.values.sizes[name]

    def _emit(self, group: tuple[Node, ...], reads: dict[str, int]) -> None:
        values = self.values
        outputs = [name for node in group for name in values.names[node] if name in values.needed]
        makers = {name: node for node in group for name in values.names[node]}
        early = all(name in self.early for name in reads) and not any(map(_is_random, group))
        known = early or all(name in self.known or name in self.early for name in reads)
        is_gathered = early and any(self.buffers[name].kind in ("parameter", "gathered") for name in reads)
        for name in outputs:
            kind = "gathered" if is_gathered else "temporary"
            fqn = origin_of(makers[name]).fqn
            self.buffers[name] = Buffer(name, values.sizes[name], kind, fqn, makers[name].name, self.backward)
            if early:
                self.early.add(name)
            if known:
                self.known.add(name)
        moved = sum(reads.values()) + sum(values.sizes[name] for name in outputs)
        self.tasks.append(self._task(group, tuple(reads), tuple(outputs), moved, known=known))

    def _task(
        self, group: tuple[Node, ...], inputs: tuple[str, ...], outputs: tuple[str, ...], moved: int, *, known: bool
    ) -> Task:
        node = group[-1]
        assert isinstance(node.target, OpOverload)
        task = Task(
            outputs[-1] if outputs else f"{'backward.' if self.backward else ''}{node.name}",
            "compute",
            COMPUTE,
            0.0,
            inputs,
            outputs,
            nbytes=moved,
            fqn=origin_of(node).fqn,
            nodes=tuple(n.name for n in group),
            backward=self.backward,
        )
        if node.target in OPERATORS:
            return self._pipelined(node, task)
        if (kind := kind_of_op(node.target)) is not None:
            return self._collective(node, kind, task, prefetchable=known)
        if len(group) == 1 and not is_fusible(node.target):
            call = call_of(node)
            seconds = kernel_seconds(call, self.hardware)
            workspace = _workspace(node, fused=self.fused)
            return replace(task, seconds=seconds, flops=kernel_flops(call), workspace=workspace)
        flops = float(sum(math.prod(tensor.shape) for n in group for tensor in results_of(n)))
        seconds = region_seconds(flops, moved, self.hardware)
        self.moves.add(task.name)
        # Inductor writes a kernel's result over an operand that one op of the kernel reads, and no other.
        in_place = self.fused and len(outputs) == 1 and not any(is_reduction(n.target) for n in group)
        return replace(task, seconds=seconds, flops=flops, in_place=in_place)

    def _collective(self, node: Node, kind: Kind, task: Task, *, prefetchable: bool) -> Task:
        transfer = transfer_of(node)
        axes = self.mesh.axes_of_group(str(node.args[-1]))
        nbytes = max(sum(map(_result_bytes, operands(node))), _result_bytes(node))
        group = self.mesh.group_shape(axes)
        return replace(
            task,
            kind=kind.name,
            stream=link_of(group),
            seconds=collective_seconds(kind.name, nbytes, group, self.hardware),
            in_place=kind.in_place,
            axes=axes,
            dtype=DTYPE_NAMES[results_of(node)[0].dtype],
            nbytes=nbytes,
            steps=() if transfer is None else transfer.steps,
            prefetchable=prefetchable,
        )

    def _pipelined(self, node: Node, task: Task) -> Task:
        """A kernel that sends."""
        transfer, price = transfer_of(node), pipelined(call_of(node), self.hardware)
        axes = self.mesh.axes_of_group(str(node.args[-1]))
        return replace(
            task,
            link=link_of(self.mesh.group_shape(axes)),
            seconds=price.seconds,
            sending=price.sending,
            waiting=price.waiting,
            workspace=price.workspace,
            axes=axes,
            dtype=DTYPE_NAMES[results_of(node)[0].dtype],
            flops=price.flops,
            steps=() if transfer is None else transfer.steps,
        )

    def keep(self, value: Node, kind: str, fqn: str = "") -> None:
        """Say what becomes of a result: an output, a gradient, or a value for the backward."""
        for name in self.names[value]:
            buffer = self.buffers[name]
            if buffer.kind in ("temporary", "gathered") and not (buffer.kind == "gathered" and kind == "activation"):
                self.buffers[name] = replace(buffer, kind=kind, fqn=fqn or buffer.fqn)

    def return_buffers(self, values: Sequence[Any]) -> None:
        """The runtime copies new values of buffers into the buffers when the forward is done."""
        names = tuple(name for value in values if isinstance(value, Node) for name in self.names[value])
        if names:
            moved = 2 * sum(self.buffers[name].nbytes for name in names)
            seconds = region_seconds(0.0, moved, self.hardware)
            self.tasks.append(Task("buffers", "compute", COMPUTE, seconds, names, nbytes=moved))

    def update(self, gradient: Node, fqn: str, optimizer: str | None) -> None:
        """The update of the parameter that a gradient is of."""
        if optimizer not in OPTIMIZER_STATES:
            known = ", ".join(repr(name) for name in OPTIMIZER_STATES)
            raise UserError(f"unknown optimizer {optimizer!r}; its memory and time are known for {known}")
        names = self.names[gradient]
        if optimizer is None or fqn.startswith("input:") or not names:
            return
        nbytes = _nbytes(value_of(gradient))
        parameter = f"{InputRole.PARAMETER.value}.{fqn}"
        inputs = [*names, *([parameter] if parameter in self.buffers else [])]
        name = f"optimizer.{fqn or names[0]}"
        if OPTIMIZER_STATES[optimizer]:
            self.buffers[name] = Buffer(name, OPTIMIZER_STATES[optimizer] * nbytes, OPTIMIZER, fqn)
            inputs.append(name)
        moved = nbytes * (1 + 2 * (1 + OPTIMIZER_STATES[optimizer]))  # the gradient is read, parameter and state also written
        seconds = moved / self.hardware.memory_bandwidth
        self.updates.append(Task(name, OPTIMIZER, COMPUTE, seconds, tuple(inputs), nbytes=moved, fqn=fqn, backward=True))

    def program(self) -> Program:
        tasks = _with_deferrable(self.tasks, self.buffers, self.moves)
        return Program((*tasks, *self.updates), tuple(self.buffers.values()), self.mesh)


_INPUT_KINDS = {
    InputRole.PARAMETER: "parameter",
    InputRole.BUFFER: "buffer",
    InputRole.INPUT: "input",
    InputRole.TANGENT: "temporary",
    InputRole.COORDINATE: "input",
    InputRole.SEED: "input",
    InputRole.SAVED: "activation",
}


def viewed_by(node: Node) -> Node | None:
    """The operand that `node` gives as it is or as a view of: it runs nothing and makes no buffer."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    is_view = is_alias(node) or node.target is torch.ops._c10d_functional.wait_tensor.default
    return source if is_view and isinstance(source, Node) else None


def _position(source: Node, index: Any) -> int | None:
    """Where item `index` stands among the tensor results; None for what is no tensor."""
    value = value_of(source)
    if not isinstance(value[index], torch.Tensor):
        return None
    return sum(isinstance(item, torch.Tensor) for item in value[:index])


@cache
def _is_random_op(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and _is_random_op(node.target)


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _result_bytes(node: Node) -> int:
    return sum(map(_nbytes, results_of(node)))


def _workspace(node: Node, *, fused: bool) -> int:
    """Bytes that a kernel takes beside its operands and results.

    A convolution keeps weights in an order of its own; where Inductor has not laid out the rest for it, also its
    largest operand or result, and in the backward one on each side. A flash attention's backward sums the gradient
    of the query in f32.
    """
    name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""
    tensors = [tensor_of(operand) for operand in operands(node)]
    if name == "convolution":  # operands: value, weight, perhaps bias
        return _nbytes(tensors[1]) if fused else max(map(_nbytes, (*results_of(node), *tensors)))
    if name == "convolution_backward":  # operands: gradient, value, weight
        return REORDERED_WEIGHTS * _nbytes(tensors[2]) if fused else _nbytes(tensors[0]) + _nbytes(tensors[1])
    if name.startswith("_scaled_dot_product") and name.endswith("attention_backward"):
        return 4 * math.prod(results_of(node)[0].shape)
    return 0


def _with_deferrable(tasks: list[Task], buffers: dict[str, Buffer], moves: set[str]) -> list[Task]:
    """Mark collectives whose results become results of the program by moves, casts and collectives alone."""
    readers: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        for name in task.inputs:
            readers.setdefault(name, []).append(number)
    late = [False] * len(tasks)
    found = list(tasks)
    for number, task in reversed(list(enumerate(tasks))):
        ends = all(
            buffers[name].kind in ("gradient", "output") or readers.get(name) for name in task.outputs
        ) and all(late[reader] for name in task.outputs for reader in readers.get(name, ()))
        late[number] = ends and len(task.inputs) == 1 and (task.is_collective or task.name in moves)
        if ends and task.is_collective and not task.prefetchable:
            found[number] = replace(task, deferrable=True)
    return found
