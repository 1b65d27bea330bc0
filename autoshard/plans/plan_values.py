"""Read parameters, inputs, outputs and intermediate values of a program, with their layouts, off a graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from passes.ir.graph import (
    InputRole,
    OutputRole,
    has_layout,
    input_of,
    is_tensor,
    layout_of,
    needs_of,
    output_node,
    outputs_of,
    placeholders,
    returned,
    tensor_of,
)
from passes.ir.layout import Layout, local_shape
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Value:
    """A parameter, input or output of a plan: its name, global shape, dtype (`"f32"`) and layout.

    `plan.parameters`, `plan.inputs` and `plan.outputs` have them by name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one device's part."""
        return local_shape(self.layout, self.shape, mesh)


def inputs_of(gm: GraphModule, role: InputRole) -> dict[str, Value]:
    """Return the placeholders of one role by name; shapes must still be global."""
    return {input_of(n).name: _value(input_of(n).name, n, layout_of(n)) for n in placeholders(gm.graph, role)}


def results_by_name(gm: GraphModule, role: OutputRole) -> dict[str, Value]:
    """Return the program's results of one role by name; shapes must still be global."""
    needs = iter(needs_of(output_node(gm.graph)))
    found = {}
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        if not isinstance(value, Node) or not is_tensor(value):
            continue
        layout = next(needs)
        if output.role is role:
            found[output.name] = _value(output.name, value, layout)
    return found


def layouts_by_name(gm: GraphModule) -> dict[str, Layout]:
    """Return the layout of every value with one tensor result, by node name."""
    return {node.name: layout_of(node) for node in gm.graph.nodes if has_layout(node) and is_tensor(node)}


def _value(name: str, node: Node, layout: Layout) -> Value:
    tensor = tensor_of(node)
    return Value(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), layout)
