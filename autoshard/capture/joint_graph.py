"""Turn AOTAutograd's joint graph into a CAPTURED graph: roles, readable names, ordered results, an origin per node."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen

from autoshard.capture.capture_errors import format_place
from autoshard.capture.flat_call import FlatCall
from autoshard.capture.origins import set_origins
from passes._torch import JointGraph, OpOverload, checkpoint_of, clear_checkpoint, is_fake
from passes.errors import CaptureError
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    Stage,
    origin_of,
    output_node,
    returned,
    set_input,
    set_origin,
    set_outputs,
    set_region,
    set_stage,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.numbering import number_regions
from passes.ir.text import DTYPE_NAMES

aten = torch.ops.aten

# Assertions on values have no result to lay out, and a rank that raised alone would leave the others waiting.
_CHECKS = (
    *(aten._assert_async.default, aten._assert_async.msg, aten._assert_tensor_metadata.default),
    aten._linalg_check_errors.default,
)
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default)
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)


def finish_graph(joint: JointGraph, flat: FlatCall, fqns: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Turn `joint` into a CAPTURED graph in place; return the literals that became BUFFER placeholders, by name.

    `fqns` maps the id of a traced module to its name. Raises CaptureError if the model changes an input or parameter.
    """
    gm, keys = joint.graph_module, tuple(flat.tensors)
    graph = gm.graph
    graph.set_codegen(CodeGen())
    set_origins(graph, fqns)
    _check_changes(joint, keys, flat.constants)
    _set_results(joint, keys, flat.signature.outputs)
    _share_outputs(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
        elif node.op == "call_function" and node.target is aten.cat.default and len(node.args[0]) == 1:
            _copy_one(node)
        elif node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)
    literals = _set_inputs(joint, keys, flat.signature.outputs)
    graph.eliminate_dead_code()
    _check_ops(graph)
    _set_regions(graph)
    gm.recompile()
    set_stage(gm, Stage.CAPTURED)
    return literals


def _check_changes(joint: JointGraph, keys: tuple[Input, ...], constants: Mapping[str, torch.Tensor]) -> None:
    with_gradient = {number for kind, number in joint.inputs if kind == "mutation"}
    for end, node in zip(joint.outputs, returned(joint.graph_module.graph), strict=True):
        if end is None or end[0] != "mutation":
            continue
        key, place = keys[end[1]], format_place(origin_of(node))
        name = key.name.rpartition(".")[2]
        if key.role is InputRole.INPUT and name != key.name:
            raise CaptureError(
                f"the model changes its input {key.name} in place, which no other rank would see; work on a copy, made with "
                f"clone(){place}"
            )
        if key.role is InputRole.INPUT:
            raise CaptureError(
                f"the model changes its input {key.name} in place, which no other rank would see; "
                f"work on a copy: {name} = {name}.clone(){place}"
            )
        if key.role is InputRole.PARAMETER and node.target is torch.ops.aten.embedding_renorm.default:
            raise CaptureError(
                f"max_norm makes an embedding change its parameter {key.name} in the forward; leave max_norm out, and limit the "
                f"norms after the step: {name}.mul_((max_norm / {name}.norm(dim=1, keepdim=True)).clamp(max=1)){place}"
            )
        if key.role is InputRole.PARAMETER:
            raise CaptureError(
                f"the model changes its parameter {key.name} in the forward; change parameters outside of it, "
                f"in the optimizer or after the step{place}"
            )
        if key.name in constants:
            raise CaptureError(
                f"the model changes {key.name}, which is neither buffer nor parameter; "
                f"make it a buffer: self.register_buffer({name!r}, ...){place}"
            )
        if end[1] in with_gradient:
            raise CaptureError(
                f"the model gives its buffer {key.name} a value that carries a gradient, so that the next step would "
                f"reach into this one; detach the value first{place}"
            )


def _set_results(joint: JointGraph, keys: tuple[Input, ...], outputs: tuple[str, ...]) -> None:
    graph = joint.graph_module.graph
    found = dict(zip(joint.outputs, returned(graph), strict=True))
    results: list[tuple[Output, Node | None]] = [
        (Output(OutputRole.OUTPUT, path), found["output", number]) for number, path in enumerate(outputs)
    ]
    for number, key in enumerate(keys):
        if ("mutation", number) in found:
            results.append((Output(OutputRole.BUFFER, key.name), found["mutation", number]))
    for number, key in enumerate(keys):
        if ("gradient", number) in found and key.role is not InputRole.BUFFER:
            name = key.name if key.role is InputRole.PARAMETER else f"input:{key.name}"
            results.append((Output(OutputRole.GRADIENT, name), found["gradient", number]))
    output_node(graph).args = (tuple(node for _, node in results),)
    set_outputs(graph, tuple(output for output, _ in results))


def _share_outputs(graph: Graph) -> None:
    """Undo the clones of `flat_call`, except for an output that shares memory with an input or another result."""
    results = list(returned(graph))
    bases = [_base(_uncloned(node)) for node in results if isinstance(node, Node)]
    for number, node in enumerate(results):
        if not isinstance(node, Node) or node is _uncloned(node):
            continue
        base = _base(_uncloned(node))
        if base.op != "placeholder" and bases.count(base) == 1:
            results[number] = _uncloned(node)
    output_node(graph).args = (tuple(results),)


def _uncloned(node: Node) -> Node:
    if node.target is aten.clone.default and isinstance(node.args[0], Node):
        return node.args[0]
    return node


def _copy_one(node: Node) -> None:
    """Replace a concatenation of a single tensor by that tensor or, where strides differ or it is a result, by a copy."""
    [given] = node.all_input_nodes
    value = value_of(node)
    is_like = all(getattr(value, name) == getattr(value_of(given), name) for name in ("shape", "dtype"))
    if is_like and value.stride() == value_of(given).stride() and output_node(node.graph) not in node.users:
        node.replace_all_uses_with(given)
    elif is_like and value.is_contiguous():
        node.target, node.args, node.kwargs = aten.clone.default, (given,), {"memory_format": torch.contiguous_format}


def _base(node: Node) -> Node:
    """Return the node whose memory `node` views."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    arguments = node.target._schema.arguments
    return any(argument.alias_info is not None and not argument.alias_info.is_write for argument in arguments)


def _set_inputs(joint: JointGraph, keys: tuple[Input, ...], outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Give placeholders their roles and readable names; literals become BUFFER placeholders after the others, but numbers
    become calls, as they would differ in each of many equal layers.
    """
    gm = joint.graph_module
    old = gm.graph.find_nodes(op="placeholder")
    inputs = [
        keys[number] if kind == "input" else Input(InputRole.TANGENT, outputs[number]) for kind, number in joint.inputs
    ]
    literals: dict[str, torch.Tensor] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(gm)
        if not isinstance(value, torch.Tensor):
            continue
        if value.ndim == 0 and not value.is_meta and not is_fake(value):
            _fill(node, value)
            continue
        name = f"constant_{len(literals)}"
        literals[name] = value
        place = sum(key.role in (InputRole.PARAMETER, InputRole.BUFFER) for key in inputs)
        inputs.insert(place, Input(InputRole.BUFFER, name))
        old.insert(place, node)
    first = next(node for node in gm.graph.nodes if node.op in ("call_function", "output"))
    with gm.graph.inserting_before(first):
        for key, node in zip(inputs, old, strict=True):
            _replace_placeholder(gm.graph, node, key)
    return literals


def _fill(node: Node, number: torch.Tensor) -> None:
    """Replace a literal without dims by a call that makes it."""
    kwargs: dict[str, Any] = {"dtype": number.dtype, "layout": torch.strided, "device": number.device, "pin_memory": False}
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten.full.default, ([], number.item()), kwargs)
    set_value(new, value_of(node))
    set_origin(new, origin_of(node))
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _replace_placeholder(graph: Graph, old: Node, key: Input) -> None:
    readable = re.sub(r"\W", "_", key.name).replace("tangents", "tangent")
    if key.role is InputRole.TANGENT:
        readable = f"tangents_{readable}"
    new = graph.placeholder("self_" if readable == "self" else readable)  # FX calls the module of a graph self
    new.target = new.name
    set_value(new, value_of(old))
    set_input(new, key)
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _set_regions(graph: Graph) -> None:
    """Mark what the model computes inside of `torch.utils.checkpoint` to be recomputed in the backward."""
    for node in graph.nodes:
        found = checkpoint_of(node)
        if found is not None and found[1]:
            raise CaptureError(
                "the model says by context_fn of torch.utils.checkpoint which values to keep, which cannot be followed; "
                "leave context_fn out, or checkpoint() out and choose by Options(recompute=...)"
                f"{format_place(origin_of(node))}"
            )
        if found is not None:
            set_region(node, found[0])
            clear_checkpoint(node)
    number_regions(graph)


def _check_ops(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node.target is operator.getitem:
            continue
        if not isinstance(node.target, OpOverload):
            if str(node.target).startswith("auto_functionalized") and isinstance(node.args[0], OpOverload):
                raise CaptureError(
                    f"{node.args[0]} changes an argument in place, which a graph cannot hold of an operator that is not torch's "
                    f"own; let it return a new tensor{format_place(origin_of(node))}"
                )
            raise CaptureError(
                f"{node.target} keeps a graph of its own, which cannot be sharded; "
                f"write it with plain tensor operations{format_place(origin_of(node))}"
            )
        dtypes = dict.fromkeys(tensor_of(value).dtype for value in node.all_input_nodes) if node.target in _PRODUCTS else {}
        if len(dtypes) > 1:  # tracing does not reject this
            raise CaptureError(
                f"the model multiplies {' by '.join(DTYPE_NAMES[dtype] for dtype in dtypes)}, which no device does; cast one, "
                "such as x.to(weight.dtype) (with mixed precision, parameters and inputs come in its param_dtype)"
                + format_place(origin_of(node))
            )
