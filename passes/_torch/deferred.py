"""Functions that need dynamo, AOTAutograd, Inductor or checkpoints, which are imported at the first call.

These take longer to import than torch itself, and reading a plan or a `--help` needs none of them. If torch lacks a
name, the first call raises an ImportError that says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from passes._torch.dtensor import Box
from passes._torch.results import InductorCode, JointGraph, TracedModule, TraceFailure
from passes._torch.supported import unsupported


@cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"passes._torch.{name}")
    except (ImportError, AttributeError) as error:
        raise unsupported(error) from error


def trace_module(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks_leaves: bool = True
) -> TracedModule:
    """Trace a call with dynamo: static shapes, numbers as constants. Raises exceptions that `trace_failure`
    describes.

    Without `marks_leaves`, `requires_grad_()` has no effect on a value that is no parameter: its gradient goes nowhere.
    """
    traced: TracedModule = _module("dynamo.module_trace").trace_module(module, args, kwargs, marks_leaves=marks_leaves)
    return traced


def trace_failure(error: Exception) -> TraceFailure:
    """Return why `trace_module` or `trace_joint` raised `error`."""
    failure: TraceFailure = _module("dynamo.module_trace").trace_failure(error)
    return failure


def trace_joint(flat: GraphModule, args: tuple[torch.Tensor, ...], decompositions: dict[Any, Any]) -> JointGraph:
    """Trace forward and backward of `flat`, or the forward alone if no output needs a gradient."""
    joint: JointGraph = _module("joint").trace_joint(flat, args, decompositions)
    return joint


def min_cut_partition(
    joint: GraphModule, *, num_forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward of a joint graph with placeholders `primals_*` and `tangents_*`."""
    halves: tuple[GraphModule, GraphModule] = _module("partition").min_cut_partition(
        joint, num_forward_outputs=num_forward_outputs, static_inputs=static_inputs
    )
    return halves


def teach_checkpoints(boxes_of: Callable[[DTensor], Sequence[Box] | None]) -> None:
    """Let `torch.distributed.checkpoint` save and load DTensors whose local part is several boxes.

    Tensors for which `boxes_of` returns None are saved and loaded by torch's own methods.
    """
    _module("dtensor_hooks.checkpoints").teach_checkpoints(boxes_of)


def refuse_wrong_views() -> None:
    """Let a view of a DTensor raise where torch would silently mix up its elements."""
    _module("dtensor_hooks.dtensor_views").refuse_wrong_views()


def write_to_parts(part_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let a change in place of a part of a DTensor, `weight[0].zero_()`, change the DTensor; `part_like` cuts a whole one."""
    _module("dtensor_hooks.dtensor_views").write_to_parts(part_like)


def assign_data(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `parameter.data = tensor` change a DTensor; `laid_out_as` cuts a whole tensor as a DTensor is."""
    _module("dtensor_hooks.values").assign_data(laid_out_as)


def draw_whole(laid_out_as: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let random ops of a DTensor on CPU draw one device's numbers; `laid_out_as` cuts a whole tensor as a DTensor is."""
    _module("dtensor_hooks.values").draw_whole(laid_out_as)


def reduce_empty_parts() -> None:
    """Let `max()`, `amax()`, `argmax()` and norms of a DTensor be one device's where a rank has no elements of it."""
    _module("dtensor_hooks.empty_parts").reduce_empty_parts()


def correct_wrong_rules() -> None:
    """Let sums of norms, means of losses and sums along a last dim of sharded DTensors be one device's."""
    _module("dtensor_hooks.wrong_rules").correct_wrong_rules()


def read_numbers(whole_of: Callable[[DTensor], torch.Tensor]) -> None:
    """Let `item()`, and with it `bool()`, `float()` and formats, of a DTensor read what `whole_of` returns, not a rank's part."""
    _module("dtensor_hooks.values").read_numbers(whole_of)


def allow_in_compiled_code(subclass: type[torch.Tensor]) -> None:
    """Let compiled functions take tensors of `subclass`, which changes nothing below `__torch_function__`."""
    _module("dynamo.plain_subclasses").allow_in_compiled_code(subclass)


def unchanged_since_now(dicts: Sequence[Mapping[Any, Any]]) -> Callable[[], bool]:
    """Return a function that says whether none of `dicts` was written to since now; it takes about 10 ns a dict."""
    check: Callable[[], bool] = _module("guards").unchanged_since_now(dicts)
    return check


def alike_as_now(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that says whether all `tensors` have the type, dtype and device that they have now, and require
    gradients as now; it takes about 50 ns a tensor. It says no in another mode, of autocast or inference, say."""
    check: Callable[[], bool] = _module("guards").alike_as_now(tensors)
    return check


def run_joint_graph_passes(gm: GraphModule) -> None:
    """Run the passes that Inductor runs before the partition: constant folding, attention patterns, no-ops."""
    _module("inductor.compilation").run_joint_graph_passes(gm)


def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    static_inputs: Sequence[int],
    visible_outputs: Sequence[int],
    is_backward: bool,
    is_inference: bool,
    keep_order: bool,
) -> InductorCode:
    """Compile a flat ATen graph on fake `inputs`.

    `visible_outputs` keep the strides of the graph. With `keep_order`, collectives and waits stay where the graph has
    them; by default Inductor moves each wait after its collective.
    """
    code: InductorCode = _module("inductor.compilation").inductor_compile(
        gm,
        inputs,
        static_inputs=static_inputs,
        visible_outputs=visible_outputs,
        is_backward=is_backward,
        is_inference=is_inference,
        keep_order=keep_order,
    )
    return code


def select_decompositions(*, whole: frozenset[OpOverload]) -> dict[Any, Any]:
    """Return Inductor's decompositions, without those of `whole`."""
    table: dict[Any, Any] = _module("joint").select_decompositions(whole=whole)
    return table
