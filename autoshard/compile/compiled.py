"""Partition a LOCAL graph into forward and backward, and compile each with Inductor or run it as an FX graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import (
    OpOverload,
    box,
    inductor_compile,
    min_cut_partition,
    module_of,
    run_joint_graph_passes,
    tag_recompute,
    tag_save,
    without_autocast,
    without_modes,
)
from passes.errors import CompilerError
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    Stage,
    copy_graph,
    has_input,
    input_of,
    made_again,
    operands,
    outputs_of,
    placeholders,
    returned,
    saving_of,
    set_input,
    set_outputs,
    set_recompute,
    set_stage,
    transfer_of,
    value_of,
)

Mode = Literal["inductor", "eager"]
Code = Callable[[list[torch.Tensor]], Sequence[Any]]

STATIC_ROLES = (InputRole.PARAMETER, InputRole.BUFFER)


@dataclass(frozen=True)
class Split:
    """A partitioned program before compilation; a rank can make it without waiting for the others."""

    forward: GraphModule
    backward: GraphModule | None  # None: forward only
    inputs: tuple[Input, ...]  # of the forward, in order
    outputs: tuple[Output, ...]  # of the forward, in order: OUTPUT, then BUFFER
    tangents: tuple[Input, ...]  # of the backward, in order, after the saved tensors
    gradients: tuple[Output, ...]  # of the backward, in order
    input_values: tuple[Any, ...]  # fake
    tangent_values: tuple[torch.Tensor, ...]  # fake


@dataclass(frozen=True)
class Program:
    """A compiled program. Tensors are per-device; every list passed in is emptied, so that inputs can be freed early.
    """

    split: Split
    _forward: Code
    _backward: Code | None

    def forward(self, inputs: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs, the new values of buffers, and the tensors saved for the backward.

        `inputs` are in the order of `split.inputs`; the results in that of `split.outputs`.
        """
        with without_modes():
            results = list(self._forward(inputs))
        count = len(self.split.outputs)
        buffers = sum(output.role is OutputRole.BUFFER for output in self.split.outputs)
        return results[: count - buffers], results[count - buffers : count], results[count:]

    def backward(self, saved: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients in the order of `split.gradients`; `tangents` are in the order of `split.tangents`."""
        if self._backward is None:
            raise CompilerError("this program was captured without gradients")
        arguments = [*saved, *tangents]
        saved.clear()
        tangents.clear()
        with without_modes():
            return list(self._backward(arguments))


def strided_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the strides that a program was made for, copied if it has others.

    A conjugate or a negative that is only marked as such is computed: a program was made for what memory holds.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@without_autocast()
def split_program(gm: GraphModule, *, mode: Mode) -> Split:
    """Partition a LOCAL graph into forward and backward.

    A gathered parameter (`is_recompute`), and whatever is computed from such parameters alone, is gathered again in
    the backward, right before its use; so is any other value that is marked to be sent again, with its views and
    copies. Results of other collectives are saved, unless the graph marks a value as remade or saved (`saving_of`).
    """
    outputs = outputs_of(gm.graph)
    gradients = tuple(output for output in outputs if output.role is OutputRole.GRADIENT)
    count = len(outputs) - len(gradients)
    joint = _with_partitioner_names(gm)
    forward_inputs = tuple(n for n in placeholders(joint.graph) if input_of(n).role is not InputRole.TANGENT)
    tangents = placeholders(joint.graph, InputRole.TANGENT)
    _tag_gathers(joint.graph)
    _tag_savings(joint.graph)
    if mode == "inductor":
        run_joint_graph_passes(joint)
    forward, backward = joint, None
    if gradients:
        static = [i for i, node in enumerate(forward_inputs) if input_of(node).role in STATIC_ROLES]
        forward, backward = min_cut_partition(joint, num_forward_outputs=count, static_inputs=static)
        for half in (forward, backward):
            _drop_unread(half)
        _set_roles(forward, backward, outputs[:count], gradients)
    return Split(
        forward,
        backward,
        tuple(input_of(node) for node in forward_inputs),
        outputs[:count],
        tuple(input_of(node) for node in tangents) if gradients else (),
        gradients,
        tuple(value_of(node) for node in forward_inputs),
        tuple(value_of(node) for node in tangents) if gradients else (),
    )


def _drop_unread(gm: GraphModule) -> None:
    """Remove the gathers from the forward that only the backward reads.

    The backward makes them again, but the partitioner keeps them in the forward because it treats waits as impure.
    """
    gm.graph.eliminate_dead_code(lambda node: node.is_impure() and not _is_functional_collective(node))


def _set_roles(
    forward: GraphModule, backward: GraphModule, outputs: tuple[Output, ...], gradients: tuple[Output, ...]
) -> None:
    """Set the roles of the inputs and outputs of both graphs; the partitioner keeps only those of the joint graph's
    inputs.
    """
    kept = [value for value in returned(forward.graph)[len(outputs) :] if isinstance(value, Node)]
    set_outputs(forward.graph, (*outputs, *(Output(OutputRole.SAVED, value.name) for value in kept)))
    set_outputs(backward.graph, gradients)
    for value, node in zip(kept, placeholders_of(backward), strict=False):
        if not has_input(node):
            set_input(node, Input(InputRole.SAVED, value.name))
    for gm in (forward, backward):
        set_stage(gm, Stage.LOCAL)


def _with_partitioner_names(gm: GraphModule) -> GraphModule:
    """Return a copy with the placeholder names that the partitioner expects: primals first, then tangents."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for name, node in _partitioner_inputs(gm):
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    copied = module_of(graph, gm)
    set_stage(copied, Stage.LOCAL)
    return copied


def _partitioner_inputs(gm: GraphModule) -> Iterator[tuple[str, Node]]:
    ordered = sorted(placeholders(gm.graph), key=lambda node: input_of(node).role is InputRole.TANGENT)
    for number, node in enumerate(ordered, start=1):
        yield f"{'tangents' if input_of(node).role is InputRole.TANGENT else 'primals'}_{number}", node


def partitioner_names(gm: GraphModule) -> dict[str, Node]:
    """Return the nodes of a LOCAL graph by the names that they have in its halves."""
    calls = {node.name: node for node in gm.graph.nodes if node.op == "call_function"}
    return calls | dict(_partitioner_inputs(gm))


def _tag_gathers(graph: Graph) -> None:
    """Tag what is gathered again in the backward, without the items of a call that is saved, as it cannot make them again."""
    again = made_again(graph)
    for node in graph.nodes:
        is_saved_item = node.target is operator.getitem and saving_of(operands(node)[0]) == "saved"
        if node in again and not is_saved_item:
            set_recompute(node, True)
            tag_recompute(node)


def _tag_savings(graph: Graph) -> None:
    for node in graph.nodes:
        if saving_of(node) == "saved":
            tag_save(node)
        elif saving_of(node) == "remade":
            tag_recompute(node)


@without_autocast()
def compile_split(split: Split, *, mode: Mode) -> Program:
    """Compile both halves."""
    if mode == "eager":
        return Program(split, box(split.forward), None if split.backward is None else box(split.backward))
    keep_order = _has_collectives(split.forward) or (split.backward is not None and _has_collectives(split.backward))
    static = [i for i, given in enumerate(split.inputs) if given.role in STATIC_ROLES]
    forward = inductor_compile(
        copy_graph(split.forward),  # Inductor rewrites its input; a profile runs the original graph
        split.input_values,
        static_inputs=static,
        visible_outputs=_nodes_among(split.forward, len(split.outputs)),
        is_backward=False,
        is_inference=split.backward is None,
        keep_order=keep_order,
    )
    if split.backward is None:
        return Program(split, forward.run, None)
    saved_strides = forward.output_strides[len(split.outputs) :]
    backward = inductor_compile(
        copy_graph(split.backward),
        _backward_values(split, saved_strides),
        static_inputs=range(len(placeholders_of(split.backward)) - len(split.tangents)),
        visible_outputs=_nodes_among(split.backward, len(split.gradients)),
        is_backward=True,
        is_inference=False,
        keep_order=keep_order,
    )
    return Program(split, forward.run, backward.run)


def placeholders_of(gm: GraphModule) -> tuple[Node, ...]:
    return tuple(gm.graph.find_nodes(op="placeholder"))


def _backward_values(split: Split, saved_strides: Sequence[tuple[int, ...] | None]) -> tuple[Any, ...]:
    """Return fake inputs of the backward, with the strides that the compiled forward gives to saved tensors."""
    assert split.backward is not None
    values = [value_of(node) for node in placeholders_of(split.backward)]
    for position, stride in enumerate(saved_strides):
        value = values[position]
        if stride is not None and tuple(value.stride()) != stride:
            values[position] = value.as_strided(value.shape, stride)
    return tuple(values)


def _nodes_among(gm: GraphModule, count: int) -> list[int]:
    return [i for i, value in enumerate(returned(gm.graph)[:count]) if isinstance(value, Node)]


def _has_collectives(gm: GraphModule) -> bool:
    return any(_is_functional_collective(node) or transfer_of(node) is not None for node in gm.graph.nodes)


def _is_functional_collective(node: Node) -> bool:
    """Return whether a node is a functional collective or the wait for one."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"
