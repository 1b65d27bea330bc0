"""AOTAutograd: forward and backward traced as one graph, in the ops that decompositions leave."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops import effects
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch.fx import GraphModule

from passes._torch.operators.decompositions import DECOMPOSITIONS
from passes._torch.patches import replaced
from passes._torch.results import JointGraph

aten = torch.ops.aten

_torch_has_effects = effects.has_effects


def trace_joint(flat: GraphModule, args: tuple[torch.Tensor, ...], decompositions: dict[Any, Any]) -> JointGraph:
    """Trace forward and backward of `flat`, or the forward alone if no output needs a gradient.

    Torch takes oneDNN's kernel for an LSTM whose input on the CPU needs no gradient: an op that cannot be sharded, and whose
    forward keeps nothing for the backward unless autograd records it. Without oneDNN an LSTM is traced as its products.
    The backward is that of a `backward()` outside of autocast, also where the forward is within: torch would trace both within,
    and cast the gradients of what the model computes in a block that leaves autocast.
    """
    no_kernel = replaced(torch._C, "_get_mkldnn_enabled", lambda: False)
    outside = config.patch(backward_pass_autocast="off")
    with ExitStack() as stack, replaced(effects, "has_effects", _has_effects), no_kernel, outside:
        joint = aot_export_joint_with_descriptors(stack, flat, args, decompositions=decompositions)
        graph_module = joint.graph_module
    descriptions = graph_module.graph.output_node().meta["desc"]
    inputs = tuple(_input_end(node.meta["desc"]) for node in graph_module.graph.find_nodes(op="placeholder"))
    return JointGraph(graph_module, inputs, tuple(_output_end(description) for description in descriptions))


def select_decompositions(*, whole: frozenset[OpOverload]) -> dict[Any, Any]:
    """Return Inductor's decompositions and ours, without those of `whole`; Inductor's compiler is not imported for them."""
    table = select_decomp_table()
    pools = {op: _importing_lowerings(table[op]) for op in _POOLS if op in table}
    return {op: rule for op, rule in (table | pools | DECOMPOSITIONS).items() if op not in whole}


def _importing_lowerings(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition that reads `torch._inductor.lowering`, which its module does not import."""

    def made(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._inductor.lowering")
        return rule(*args, **kwargs)

    return made


_POOLS = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


def _has_effects(op: Any) -> bool:
    """Return what torch says, but false for the check of a factorization, which a graph leaves out as any other check."""
    return op is not aten._linalg_check_errors.default and _torch_has_effects(op)


def _input_end(description: Any) -> tuple[str, int]:
    if isinstance(description, PlainAOTInput):
        return ("input", description.idx)
    assert isinstance(description, TangentAOTInput), description
    end = _output_end(description.output)
    assert end is not None
    return ("tangent", end[1]) if end[0] == "output" else end


def _output_end(description: Any) -> tuple[str, int] | None:
    if description is None:
        return None
    if isinstance(description, PlainAOTOutput):
        return ("output", description.idx)
    if isinstance(description, GradAOTOutput):
        return ("gradient", _input_end(description.grad_of)[1])
    assert isinstance(description, InputMutationAOTOutput), description
    return ("mutation", _input_end(description.mutated_input)[1])
