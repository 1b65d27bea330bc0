"""Flatten a traced call: one placeholder per tensor in a fixed order, one result per tensor of the output.

Dynamo gives a placeholder only to tensors that are used, in the order of use, and returns whatever the Python code
needs to build the output. Here every parameter, buffer and argument has a placeholder, and every tensor of the output
is a result of its own, once where it is returned twice: each is cloned, so that autograd sees no output that is an input, or a
view of one or of another output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from autoshard.capture.capture_errors import (
    check_draws,
    check_functions,
    check_messages,
    check_numbers,
    check_shapes,
    format_place,
    user_name,
)
from autoshard.capture.changes import NOTHING_NEW, NewValues, name_of_new
from autoshard.capture.fake_module import FakeModule
from autoshard.capture.origins import user_frame
from autoshard.capture.selections.selected_rows import keep_rows
from autoshard.capture.signature import Call, InputSpec, NotReturned, Signature, describe_output, is_constant
from autoshard.capture.tracing import TracedCall
from passes._torch import LeftOut, flatten_pytree, memory_of
from passes.base import Remark
from passes.errors import CaptureError, with_article
from passes.ir.graph import Input, InputRole, Origin

aten = torch.ops.aten

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class FlatCall:
    """A flat graph with its signature; `graph_module(*tensors.values())` returns the tensors of `signature.outputs`."""

    graph_module: GraphModule
    tensors: dict[Input, torch.Tensor]
    constants: dict[str, torch.Tensor]
    signature: Signature
    new_values: NewValues = NOTHING_NEW
    remarks: tuple[Remark, ...] = ()


def flatten_call(
    traced_call: TracedCall,
    fake: FakeModule,
    call: Call,
    leaves: dict[str, Any],
    fake_constant: Callable[[torch.Tensor], torch.Tensor],
) -> FlatCall:
    """Flatten a traced call of `fake` with `leaves`; `fake_constant` makes fakes of any other tensors that it reads."""
    traced = traced_call.module
    arguments = {Input(InputRole.INPUT, path): leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    key_of = {id(tensor): key for key, tensor in {**fake.tensors, **arguments}.items()}
    tensors, constants = dict(fake.tensors), dict(fake.attributes)
    graph = traced.graph_module.graph
    for part in traced.graph_module.modules():
        if isinstance(part, GraphModule):
            _drop_checks(part.graph)
    selecting = keep_rows(traced.graph_module)
    _widen_masks(graph)
    check_draws(traced)
    check_shapes(graph)
    check_numbers(graph)
    check_messages(traced.graph_module)
    check_functions(graph)
    old = graph.find_nodes(op="placeholder")
    for node, tensor, source in zip(old, traced.inputs, traced.sources, strict=True):
        _check_read(node, tensor, key_of, user_name(source))
        if id(tensor) not in key_of:
            key = Input(InputRole.BUFFER, _free_name(user_name(source), tensors))
            tensors[key], constants[key.name], key_of[id(tensor)] = fake_constant(tensor), tensor, key
    tensors.update(arguments)
    with graph.inserting_before(next(iter(graph.nodes))):
        new = {key: graph.placeholder(f"input_{number}") for number, key in enumerate(tensors)}
    for node, tensor in zip(old, traced.inputs, strict=True):
        node.replace_all_uses_with(new[key_of[id(tensor)]])
        graph.erase_node(node)
    nodes = {number: new[key] for number, key in key_of.items()}
    signature, new_values, left_out = _flatten_output(graph, traced_call, call, leaves, nodes, tensors.values())
    graph.set_codegen(CodeGen())
    said = (*(_unsaid(one) for one in traced.left_out), *map(unreturned, left_out), *map(_keeps_rows, selecting))
    remarks = (*traced_call.remarks, *said)
    return FlatCall(GraphModule(traced.graph_module, graph), tensors, constants, signature, new_values, remarks)


_SAID = {  # of what is left out or replaced, and changes more than a message
    "raise": "a check of values is left out: a rank that raised alone would leave the others waiting",
    "flex_attention_replaced": (
        "flex_attention runs as scaled_dot_product_attention with a mask of all pairs, or, where score_mod changes scores, "
        "written out: its own kernel, which skips blocks, keeps a graph that cannot be sharded"
    ),
    "mask_not_compared": (
        "the attention mask is used as it is, without a look at its values: if it is causal, is_causal=True (of a decoder, "
        "tgt_is_causal=True) beside it lets attention skip what it hides"
    ),
}


def _unsaid(call: LeftOut) -> Remark:
    text = _SAID.get(call.function, f"{call.function} is left out: a program computes tensors and writes no messages")
    is_routine = call.function not in ("print", "warn", *_SAID)
    return Remark("capture", text, user_frame(call.stack), "output", routine=is_routine)


def _keeps_rows(stack: str) -> Remark:
    text = "rows that a mask selects are computed with all others, as shapes are fixed; sums and means leave the others out"
    return Remark("capture", text, user_frame(stack), "output")


def unreturned(left_out: NotReturned) -> Remark:
    """Return the remark on a part of the output that a program does not return."""
    path = left_out.path or "output"
    kind = with_article(left_out.kind)
    text = f"{path}, {kind}, is not returned: a program returns tensors in tuples, lists, dicts and dataclasses"
    return Remark("capture", text, Origin(), "output")


def _drop_checks(graph: Graph) -> None:
    """Erase assertions on values, and numbers that were read out of tensors for nothing else.

    A rank that raised alone would leave the others waiting.
    """
    for node in reversed(list(graph.nodes)):
        is_number = node.op == "call_function" and isinstance(node.meta.get("example_value"), _NUMBERS)
        is_read = node.op == "call_method" and node.target == "item"
        if not node.users and (node.target is aten._assert_scalar.default or is_number or is_read):
            graph.erase_node(node)


def _widen_masks(graph: Graph) -> None:
    """Give masks of attention that have no dim of the batch one: torch's kernel for a CPU takes two or four dims, and with
    three attention would be written out as products.
    """
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if isinstance(mask, Node) and mask.meta["example_value"].dim() == 3 == node.meta["example_value"].dim() - 1:
            with graph.inserting_before(node):
                wide = graph.call_method("unsqueeze", (mask, 0))
            wide.meta |= {"example_value": mask.meta["example_value"].unsqueeze(0)}
            wide.meta |= {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            node.replace_input_with(mask, wide)


def _check_read(placeholder: Node, value: object, key_of: dict[int, Input], name: str) -> None:
    place = format_place(user_frame(next(iter(placeholder.users), placeholder).meta.get("stack_trace")))
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"the model reads {name}, {with_article(type(value).__name__)} that is not known before it runs; "
            f"pass it as an argument{place}"
        )
    key = key_of.get(id(value))
    if torch.is_grad_enabled() and value.requires_grad and (key is None or key.role is InputRole.BUFFER):
        raise CaptureError(
            f"the model reads {name}, a tensor that needs a gradient and is no parameter of it; "
            f"register it with nn.Parameter, and modules in lists with nn.ModuleList{place}"
        )


def _free_name(name: str, taken: dict[Input, torch.Tensor]) -> str:
    while Input(InputRole.BUFFER, name) in taken:
        name += "_"
    return name


def _flatten_output(
    graph: Graph,
    traced: TracedCall,
    call: Call,
    leaves: dict[str, Any],
    placeholder_of: dict[int, Node],
    held: Iterable[torch.Tensor],
) -> tuple[Signature, NewValues, tuple[NotReturned, ...]]:
    output = graph.output_node()
    nodes: tuple[Node, ...] = tuple(output.args[0])  # type: ignore[arg-type]
    values = [torch.empty(0) for _ in nodes]
    result, _, changed = traced.module.rebuild(values)
    node_of = {**placeholder_of, **{id(value): node for value, node in zip(values, nodes, strict=True)}}
    described = describe_output(result)
    new_values, new_tensors = _new_values(traced, changed, len(described.tensors))
    returned = []
    for path, leaf in (*described.tensors, *new_tensors):
        if id(leaf) not in node_of:
            raise CaptureError(
                f"the model returns at {path} a tensor that it neither computes nor is given; make it a buffer or an "
                "argument, or do not return it"
            )
        returned.append(node_of[id(leaf)])
    if not described.tensors:
        raise CaptureError("the model returns no tensor; return what the training step needs, such as the loss")
    with graph.inserting_before(output):
        output.args = (tuple(_clone(graph, node) for node in returned),)
    signature = Signature(
        call.bound.signature,
        tuple(
            InputSpec(path, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            for path, leaf in call.leaves.items()
            if isinstance(leaf, torch.Tensor)
        ),
        tuple((path, leaf) for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)),
        call.spec,
        tuple(path for path, _ in (*described.tensors, *new_tensors)),
        described.results,
        described.spec,
        _views(returned[: len(described.tensors)], held),
    )
    return signature, new_values, described.left_out


def _views(returned: Sequence[Node], held: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the numbers of the values that share memory with another one, or with a tensor that the call is given."""
    values = {number: node.meta["example_value"] for number, node in enumerate(returned) if "example_value" in node.meta}
    memory = Counter(map(memory_of, (*values.values(), *held)))
    return frozenset(number for number, value in values.items() if memory[memory_of(value)] > 1)


def _new_values(
    traced: TracedCall, changed: list[Any], outputs: int
) -> tuple[NewValues, tuple[tuple[str, torch.Tensor], ...]]:
    """Return the changes of a call, and the tensors that it stores, with their names; they come after `outputs`."""
    if not traced.changes:
        return NOTHING_NEW, ()
    tensors: list[tuple[str, torch.Tensor]] = []
    results: list[tuple[int | None, Any]] = []
    pairs, spec = flatten_pytree(changed)
    for path, leaf in pairs:
        if isinstance(leaf, torch.Tensor):
            results.append((outputs + len(tensors), None))
            tensors.append((name_of_new(traced.changes, path), leaf))
        elif is_constant(leaf):
            results.append((None, leaf))
        else:
            what = f"{with_article(type(leaf).__name__)} in {name_of_new(traced.changes, path)}"
            raise CaptureError(
                f"the model stores {what} while it runs, but a graph computes tensors and numbers only; store those, or make the "
                "object in __init__"
            )
    return NewValues(traced.changes, tuple(name for name, _ in tensors), tuple(results), spec), tuple(tensors)


def _clone(graph: Graph, node: Node) -> Node:
    clone = graph.call_function(torch.clone, (node,))
    clone.meta.update((key, node.meta[key]) for key in ("stack_trace", "nn_module_stack") if key in node.meta)
    return clone
