"""Trace the joint graph of a model with many equal layers from a few of them, so that tracing time does not grow with
depth.

Equal layers, but for a margin, are removed from dynamo's forward graph before it is traced. Folding the joint graph of
the rest gives the same graph as folding that of the whole model, so a plan for it is a plan for the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import GraphModule, Node

from autoshard.capture.capture import Captured
from autoshard.capture.garbage import uncollected
from autoshard.capture.origins import set_origins
from autoshard.config.progress import Progress
from autoshard.phases import Passes
from passes.base import PassContext
from passes.errors import CaptureError
from passes.fold import Fold, Kept
from passes.ir.equal_layers import Indexed, Layers, depth_of
from passes.ir.folded_layers import Repeats, Run
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    copy_graph,
    input_of,
    outputs_of,
    placeholders,
    repeats_of,
    set_input,
    set_outputs,
    set_repeats,
    set_value,
)
from passes.ir.mesh import Mesh
from passes.ir.more_layers import EarlierLayers, with_all_layers
from passes.manager import PassManager

# Equal layers kept on either side, in addition to those that stay in the joint graph: if two layers use a value, its
# gradients are summed in the layer next to them, whose graph then differs from that of the others.
MARGIN = 2


def shallow_graph(
    captured: Captured, prepare: Passes, fold: Fold, ctx: PassContext, progress: Progress
) -> GraphModule | None:
    """Return the joint graph of `captured`, traced from few layers, after `prepare`, which folds it; None if that is
    not possible.

    `repeats_of` the graph says which layers were left out: `mm_3@layers.7` is represented by `mm_3`.
    """
    if fold not in captured.few_layers:
        call = captured.call
        gm, scratch = copy_graph(call.graph_module), PassContext(ctx.mesh)
        _describe(gm, captured)
        _share_parts(gm)
        if not replace(fold, margin=fold.margin + MARGIN).run(gm, scratch):
            return None
        kept = {input_of(node): call.tensors[input_of(node)] for node in placeholders(gm.graph)}
        progress("trace")
        traced, _ = captured.joint_of(replace(call, graph_module=gm, tensors=kept))
        captured.few_layers[fold] = traced, repeats_of(gm)
    traced, before = captured.few_layers[fold]
    joint = copy_graph(traced)
    progress("fold")
    PassManager(prepare).run(joint, ctx)
    runs = _joined(before.runs, repeats_of(joint).runs)
    if runs is None:
        return None
    parameters = dict(repeats_of(joint).parameters)
    parameters = {removed: parameters.get(one, one) for removed, one in before.parameters.items()} | parameters
    set_repeats(joint, Repeats(runs, _copies(joint, runs), parameters))
    return joint


@uncollected()
def few_layers(
    captured: Captured, fold: Fold, mesh: Mesh, programs: Iterable[GraphModule] = ()
) -> GraphModule | None:
    """Return the joint graph of `captured`, traced from the fewest of its equal layers; None if that is not possible.

    `programs` are LOCAL graphs of the model in other sizes: where the kept layers lack calls of the others in one of them,
    more are kept.

    It is not the fold of the whole graph: next to the layers that are left out, gradients may be summed elsewhere. Only
    together with a graph of all layers, in other sizes, does it stand for the whole.
    """
    earlier = list(map(EarlierLayers, programs))
    for kept in Kept:
        gm = _few_in_forward(captured, replace(fold, forward=kept), mesh)
        if gm is None or kept is Kept.PERIODS or all(one.are_alike(repeats_of(gm).runs) for one in earlier):
            break
    if gm is None:
        return None
    found = repeats_of(gm)
    tensors = {input_of(node): captured.call.tensors[input_of(node)] for node in placeholders(gm.graph)}
    try:
        joint, literals = captured.joint_of(replace(captured.call, graph_module=gm, tensors=tensors))
    except CaptureError:  # the error of the whole model names its own layers
        return None
    set_repeats(joint, replace(found, nodes=_copies(joint, found.runs)))
    return None if literals else joint


def _few_in_forward(captured: Captured, fold: Fold, mesh: Mesh) -> GraphModule | None:
    """Return dynamo's graph of few layers; None if no layers are equal."""
    gm = copy_graph(captured.call.graph_module)
    _describe(gm, captured)
    _share_parts(gm)
    return gm if fold.run(gm, PassContext(mesh)) else None


def is_alike(captured: Captured, other: GraphModule) -> bool:
    """Return whether the joint graph `other` of the same model has the inputs and the gradients of `captured`."""
    call = captured.call
    trained = {_gradient_of(key) for key, tensor in call.tensors.items() if captured.training and tensor.requires_grad}
    return _inputs(other) == list(call.tensors) and _gradients(other) == trained


@uncollected()
def whole_graph(few: GraphModule, earlier: Iterable[GraphModule]) -> GraphModule | None:
    """Return the joint graph of all layers, given one of `few_layers`, and those of the same model in other sizes; None
    if that is not surely right.
    """
    found = (with_all_layers(few, repeats_of(few).runs, one) for one in earlier)
    return next((one.graph for one in found if one is not None), None)


def _inputs(gm: GraphModule) -> list[Input]:
    return [input_of(node) for node in placeholders(gm.graph) if input_of(node).role is not InputRole.TANGENT]


def _gradients(gm: GraphModule) -> set[str]:
    return {output.name for output in outputs_of(gm.graph) if output.role is OutputRole.GRADIENT}


def _gradient_of(key: Input) -> str:
    return key.name if key.role is InputRole.PARAMETER else f"input:{key.name}"


def _joined(before: tuple[Run, ...], after: tuple[Run, ...]) -> tuple[Run, ...] | None:
    """Join the runs of layers removed before the trace with those removed after it; None if the latter do not contain
    them.
    """
    left, found = list(before), []
    for run in after:
        inside = [
            one
            for one in left
            if one.prefix == run.prefix and run.below[-1] < one.removed[0] <= one.removed[-1] < run.above[0]
        ]
        left = [one for one in left if one not in inside]
        removed = sorted({*run.removed, *(index for one in inside for index in one.removed)})
        if any(one.period != run.period for one in inside):
            return None
        found.append(replace(run, removed=tuple(removed)))
    return None if left else tuple(found)


def _copies(gm: GraphModule, runs: tuple[Run, ...]) -> dict[str, str]:
    """Return names for the nodes of removed layers, and the node that represents each."""
    graph = Indexed.of(gm.graph, {})
    levels = [Layers.of(graph, level) for level in range(depth_of(graph))]
    names = {}
    for run in runs:
        layers = next(one for one in levels if (run.prefix, run.below[0]) in one.members)
        for number, index in enumerate(run.removed):
            for place in layers.members[run.prefix, run.below[number % run.period]]:
                kept = graph.nodes[place].name
                names[f"{kept}@{run.prefix}.{index}"] = kept
    return names


def _describe(gm: GraphModule, captured: Captured) -> None:
    """Annotate dynamo's graph with what passes need: origins, inputs, outputs and values."""
    set_origins(gm.graph, captured.modules)
    inputs = gm.graph.find_nodes(op="placeholder")
    for node, (key, tensor) in zip(inputs, captured.call.tensors.items(), strict=True):
        set_input(node, key)
        set_value(node, tensor)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            set_value(node, node.meta.get("example_value"))
    set_outputs(gm.graph, tuple(Output(OutputRole.OUTPUT, path) for path in captured.signature.outputs))


def _share_parts(gm: GraphModule) -> None:
    """Merge equal slices of a value: `layer(x, self.cos[:n])` in a loop would make each layer different from the next.
    """
    parts: dict[tuple[Node, str], Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        source, index = node.args
        first = parts.setdefault((source, repr(index)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
