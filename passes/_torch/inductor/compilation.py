"""Inductor: its passes before the partition, and compilation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.custom_graph_pass import get_custom_graph_passes
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes._torch.inductor.corrections.corrected import CORRECTING_PASSES, corrected
from passes._torch.inductor.inductor_bools import send_booleans_as_bytes
from passes._torch.inductor.inductor_patterns import possible_patterns
from passes._torch.inductor.inductor_sends import lower_sends
from passes._torch.inductor.inductor_settings import order_settings
from passes._torch.patches import once, replaced
from passes._torch.results import InductorCode

_KEEP_ORDER = order_settings(inductor_config.get_config_copy())


def run_joint_graph_passes(gm: GraphModule) -> None:
    """Run the passes that Inductor runs before the partition: constant folding, attention patterns, no-ops.

    A node that stays keeps its `meta`: where torch removes a no-op, it writes that of the no-op over it.
    """
    kept = {node: dict(node.meta) for node in gm.graph.nodes}
    with (
        _compiling([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]),
        possible_patterns(),
        corrected(),
        replaced(ConstantFolder, "node_to_last_non_output_use", _last_uses),
    ):
        joint_graph_passes(gm)
    for node in gm.graph.nodes:
        node.meta.update(kept.get(node, {}))


def _last_uses(folder: ConstantFolder) -> dict[Node, list[Node]]:
    """Return, by node, the nodes whose values are last used there: torch's result, without its slow walk of all
    arguments."""
    graph = folder.module.graph
    assert isinstance(graph, Graph)
    last, output = defaultdict[Node, list[Node]](list), graph.output_node()
    seen = {output}
    for node in reversed(graph.nodes):
        if node is output:
            continue
        last[node] += [read for read in node.all_input_nodes if read not in seen]
        seen.update(node.all_input_nodes)
        if list(node.users) == [output]:
            last[node].append(node)
    return last


@contextmanager
def _compiling(inputs: Sequence[Any]) -> Iterator[None]:
    fake_mode = detect_fake_mode(inputs)
    if fake_mode is not None and fake_mode.shape_env is None:
        fake_mode.shape_env = ShapeEnv()  # Inductor's cache asks for one, though shapes are static
    with (
        V.set_fake_mode(fake_mode),
        tracing(TracingContext(fake_mode)),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        enable_python_dispatcher(),
    ):
        yield


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
    own = inductor_config.post_grad_custom_post_pass  # the user's pass, if there is one
    options: dict[str, Any] = {
        "fx_graph_cache": True,
        "post_grad_custom_post_pass": [*get_custom_graph_passes(own), *CORRECTING_PASSES],
    }
    if keep_order:
        options |= _KEEP_ORDER
    once("the lowering of sends", lower_sends)
    send_booleans_as_bytes(gm)
    gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible_outputs)
    with (
        _compiling(inputs),
        inductor_config.patch(options),
        corrected(),
        TracingContext.report_output_strides() as strides,
    ):
        code = compile_fx_inner(
            gm, inputs, static_input_idxs=list(static_inputs), is_backward=is_backward, is_inference=is_inference
        )
    return InductorCode(code, tuple(_plain(stride) for stride in strides or ()))


def _plain(stride: Sequence[Any] | None) -> tuple[int, ...] | None:
    return None if stride is None else tuple(int(step) for step in stride)
