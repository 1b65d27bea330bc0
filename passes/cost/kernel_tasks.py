"""Price the kernels of a graph: each becomes a task with its stream, seconds, bytes and FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.cost.collective_time import collective_seconds, link_of
from passes.cost.fused_regions import is_reduction, node_nbytes, source_of, tensor_nbytes
from passes.cost.graph_kernels import Kernel
from passes.cost.kernel_time import kernel_flops, kernel_seconds, region_seconds
from passes.cost.pipelined_matmul_time import pipelined
from passes.cost.program import COMPUTE, Task
from passes.hardware.hardware import Hardware
from passes.ir.call import call_of
from passes.ir.collectives import Kind, kind_of_op
from passes.ir.graph import operands, origin_of, results_of, tensor_of, transfer_of
from passes.ir.matmul_chunks.one_operator import OPERATORS
from passes.ir.mesh import Mesh
from passes.ir.text import DTYPE_NAMES

# Times the size of its weight that a convolution's backward holds in an order of its own, in a graph that Inductor
# compiled: measured with oneDNN on CPU, tests/cost/test_memory.py.
REORDERED_WEIGHTS = 4


@dataclass(frozen=True)
class Pricing:
    """All that the price of a kernel depends on, except for the kernel."""

    mesh: Mesh
    hardware: Hardware
    fused: bool  # whether Inductor fuses calls, or each runs as a kernel of its own


def task_of(kernel: Kernel, pricing: Pricing, *, backward: bool, prefetchable: bool) -> Task:
    """Return the task of a kernel; `prefetchable` says that its operands are there before the graph starts."""
    node = kernel.nodes[-1]
    assert isinstance(node.target, OpOverload)
    task = Task(
        kernel.outputs[-1] if kernel.outputs else f"{'backward.' if backward else ''}{node.name}",
        "compute",
        COMPUTE,
        0.0,
        tuple(kernel.reads),
        kernel.outputs,
        nbytes=kernel.nbytes,
        fqn=origin_of(node).fqn,
        nodes=tuple(n.name for n in kernel.nodes),
        backward=backward,
    )
    if node.target in OPERATORS:
        return _pipelined_matmul(node, task, pricing)
    if (kind := kind_of_op(node.target)) is not None:
        return _collective(node, kind, task, pricing, prefetchable=prefetchable)
    return _generated(kernel, task, pricing) if kernel.is_generated else _operator(node, task, pricing)


def _collective(node: Node, kind: Kind, task: Task, pricing: Pricing, *, prefetchable: bool) -> Task:
    transfer = transfer_of(node)
    axes = pricing.mesh.axes_of_group(str(node.args[-1]))
    nbytes = max(sum(map(node_nbytes, operands(node))), node_nbytes(node))
    group = pricing.mesh.group_shape(axes)
    reductions = [one for one in node.args[1:-1] if isinstance(one, str)]  # the last is the group
    return replace(
        task,
        kind=kind.name,
        stream=link_of(group),
        seconds=collective_seconds(kind.name, nbytes, group, pricing.hardware),
        in_place=kind.in_place,
        axes=axes,
        dtype=DTYPE_NAMES[results_of(node)[0].dtype],
        reduction=reductions[0] if reductions else "",
        nbytes=nbytes,
        steps=() if transfer is None else transfer.steps,
        prefetchable=prefetchable,
    )


def _pipelined_matmul(node: Node, task: Task, pricing: Pricing) -> Task:
    """Price an operator that overlaps communication with a matrix product."""
    transfer, price = transfer_of(node), pipelined(call_of(node), pricing.hardware)
    axes = pricing.mesh.axes_of_group(str(node.args[-1]))
    return replace(
        task,
        link=link_of(pricing.mesh.group_shape(axes)),
        seconds=price.seconds,
        sending=price.sending,
        waiting=price.waiting,
        workspace=price.workspace,
        axes=axes,
        dtype=DTYPE_NAMES[results_of(node)[0].dtype],
        flops=price.flops,
        steps=() if transfer is None else transfer.steps,
    )


def _generated(kernel: Kernel, task: Task, pricing: Pricing) -> Task:
    """Price a kernel that Inductor generates: one FLOP for each element of each result. One that moves nothing is none."""
    if not kernel.nbytes:
        return task
    flops = float(sum(math.prod(tensor.shape) for node in kernel.nodes for tensor in results_of(node)))
    seconds = region_seconds(flops, kernel.nbytes, pricing.hardware)
    # Inductor writes a kernel's result over an operand that one op of the kernel reads, and no other.
    reduces = any(is_reduction(node.target) for node in kernel.nodes)
    in_place = pricing.fused and len(kernel.outputs) == 1 and not reduces
    return replace(task, seconds=seconds, flops=flops, in_place=in_place)


def _operator(node: Node, task: Task, pricing: Pricing) -> Task:
    """Price an operator with a kernel of its own: a matrix product, an attention, a convolution."""
    call = call_of(node)
    if pricing.fused and _is_written_in_place(node):
        _, *others = operands(node)
        nbytes = sum(map(node_nbytes, others)) + 2 * node_nbytes(others[-1])  # it reads and writes as much as it adds
        return replace(task, seconds=region_seconds(0.0, nbytes, pricing.hardware), nbytes=nbytes, in_place=True)
    seconds = kernel_seconds(call, pricing.hardware)
    return replace(task, seconds=seconds, flops=kernel_flops(call), workspace=_workspace(node, fused=pricing.fused))


def _is_written_in_place(node: Node) -> bool:
    """Return whether a call puts values into a tensor that it alone reads, as an embedding's gradient into zeros: Inductor
    lets it write into that."""
    if node.target not in _PUTS:
        return False
    base = source_of(operands(node)[0])
    return base.op == "call_function" and len(base.users) == 1


_PUTS = frozenset(
    {
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten._unsafe_masked_index_put_accumulate.default,
    }
)


def _workspace(node: Node, *, fused: bool) -> int:
    """Return the bytes that an operator takes while it runs, beside its operands and results.

    A convolution keeps weights in an order of its own; where Inductor has not laid out the rest for it, also its
    largest operand or result, and in the backward one on each side. A flash attention's backward sums the gradient
    of the query in f32.
    """
    name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""
    tensors = [tensor_of(operand) for operand in operands(node)]
    if name == "convolution":  # operands: value, weight, perhaps bias
        return tensor_nbytes(tensors[1]) if fused else max(map(tensor_nbytes, (*results_of(node), *tensors)))
    if name == "convolution_backward":  # operands: gradient, value, weight
        weights = REORDERED_WEIGHTS * tensor_nbytes(tensors[2])
        return weights if fused else tensor_nbytes(tensors[0]) + tensor_nbytes(tensors[1])
    if name.startswith("_scaled_dot_product") and name.endswith("attention_backward"):
        return 4 * math.prod(results_of(node)[0].shape)
    return 0
