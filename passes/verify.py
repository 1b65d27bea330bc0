"""The verifier: laws that a graph must obey, one function each; `_LAWS` lists the stages between which each holds.

The error for a broken law names the pass and the node. This module stands above `passes/ir`, because from EXPLICIT on a
graph is checked against the sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, fake_mode_of, without_autocast
from passes.errors import VerifyError
from passes.ir.collectives import is_step, kind_of_op, step_axes, step_kind
from passes.ir.graph import (
    Input,
    Output,
    OutputRole,
    Stage,
    has_input,
    has_layout,
    has_needs,
    has_outputs,
    has_value,
    input_of,
    is_reshard,
    is_tensor,
    item_of,
    layout_of,
    layouts_of,
    needs_of,
    operands,
    origin_of,
    output_node,
    outputs_of,
    placeholders,
    results_of,
    returned,
    stage_of,
    tensor_of,
    transfer_of,
    value_of,
)
from passes.ir.layout import Layout, Placement, R, is_even, is_storable
from passes.ir.matmul_chunks.one_operator import OPERATORS
from passes.ir.mesh import Mesh
from passes.ir.padding import PADS
from passes.ir.text import DTYPE_NAMES, format_node, format_type, name_of_function
from passes.rules.rule import Row, Space, linear_row, row_giving, row_sharding, space_of

_WAIT = torch.ops._c10d_functional.wait_tensor.default

MOST_CALLS = 1 << 16  # kept forms of calls; a model has some hundreds
_RESULTS: dict[tuple[object, torch.dtype, str], str] = {}  # types of a call's results, as layers and passes repeat it


def verify(gm: GraphModule, mesh: Mesh) -> None:
    """Check the laws of the stage that `gm` is at. Raises VerifyError, which names the node and the stage."""
    stage = stage_of(gm)
    checked = _Checked(gm.graph, mesh, stage)
    for first, last, law in _LAWS:
        if first <= stage <= last:
            law(checked)


@dataclass(frozen=True)
class _Checked:
    """A graph that is verified, and the errors about it."""

    graph: Graph
    mesh: Mesh
    stage: Stage

    def fail(self, node: Node, what: str, *, is_readable: bool = True) -> NoReturn:
        """Raise VerifyError about `node`, with its line of text if the node can be formatted."""
        origin = origin_of(node)
        lines = [f"at stage {self.stage.name}, %{node.name} is not valid: {what}"]
        lines += [f"    {format_node(node, self.mesh)}"] if is_readable else []
        lines += [f"    {origin.source.strip()}"] if origin.source.strip() else []
        raise VerifyError("\n".join(lines))

    def fail_ends(self, what: str) -> NoReturn:
        raise VerifyError(f"at stage {self.stage.name}, the outputs are not valid: {what}")


# --- every stage


def _structure(checked: _Checked) -> None:
    """Check that the graph is flat and in order, and that every node has what its kind requires."""
    try:
        checked.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"at stage {checked.stage.name}, the graph is broken: {error}") from error
    roles: dict[Input, Node] = {}
    called = False
    for node in checked.graph.nodes:
        match node.op:
            case "placeholder":
                _placeholder(checked, node, roles)
                if called:
                    checked.fail(node, "placeholders stand before all calls", is_readable=False)
            case "call_function":
                _call(checked, node)
                called = True
            case "output":
                pass
            case _:
                what = f"it is a {node.op}; a graph has placeholders, calls of functions and one output"
                checked.fail(node, what, is_readable=False)


def _placeholder(checked: _Checked, node: Node, roles: dict[Input, Node]) -> None:
    if not has_input(node):
        checked.fail(node, "a placeholder without a role", is_readable=False)
    if not has_value(node):
        checked.fail(node, "it has no value", is_readable=False)
    twin = roles.setdefault(input_of(node), node)
    if twin is not node:
        what = f"%{twin.name} is {input_of(node).role.value} {input_of(node).name!r} as well"
        checked.fail(node, what, is_readable=False)


def _call(checked: _Checked, node: Node) -> None:
    if not isinstance(node.target, OpOverload) and name_of_function(node.target) is None:
        what = f"it calls {node.target}, which is neither an op nor in passes/ir/text/lexer.py"
        checked.fail(node, what, is_readable=False)
    if not has_value(node):
        checked.fail(node, "it has no value", is_readable=False)


def _ends(checked: _Checked) -> None:
    """Check that outputs are described, in order, and have the type of their input (a gradient's parameter, say)."""
    if not has_outputs(checked.graph):
        checked.fail_ends("they are not described")
    values, outputs = returned(checked.graph), outputs_of(checked.graph)
    if len(values) != len(outputs):
        checked.fail_ends(f"{len(values)} values have {len(outputs)} descriptions")
    order = [list(OutputRole).index(output.role) for output in outputs]
    if order != sorted(order):
        checked.fail_ends("outputs come first, then buffers, gradients and what is saved")
    for value, output in zip(values, outputs, strict=True):
        if value is None and output.role is not OutputRole.GRADIENT:
            checked.fail_ends(f"{output.role.value} {output.name!r} is None")
    for value, output, partner in _partners(checked.graph):
        new, old = tensor_of(value), tensor_of(partner)
        if new.shape != old.shape or new.dtype != old.dtype:
            types = f"%{value.name} is {format_type(new)}, %{partner.name} is {format_type(old)}"
            what = f"{output.role.value} {output.name!r} is unlike its {input_of(partner).role.value}: {types}"
            checked.fail_ends(what)


def _partners(graph: Graph) -> Iterator[tuple[Node, Output, Node]]:
    """Yield each returned value that corresponds to an input, with that input."""
    inputs = {input_of(node): node for node in placeholders(graph)}
    for value, output in zip(returned(graph), outputs_of(graph), strict=True):
        partner = inputs.get(output.partner)
        if isinstance(value, Node) and partner is not None:
            yield value, output, partner


# --- PLACED to COLLECTIVE


def _layouts(checked: _Checked) -> None:
    """Check that every tensor has a layout that its shape allows, and every operand a needed one."""
    stored = {value for value, output, _ in _partners(checked.graph) if output.role is not OutputRole.OUTPUT}
    for node in checked.graph.nodes:
        if node.op != "output" and results_of(node):
            _layouts_of_results(checked, node, padded=node in stored or _keeps_padding(node))
        if node.op == "output" or (node.op == "call_function" and results_of(node)):
            _needs(checked, node)
    for _, output, partner in _partners(checked.graph):
        _returned_as_stored(checked, output, partner)


def _layouts_of_results(checked: _Checked, node: Node, *, padded: bool) -> None:
    results, layouts = results_of(node), layouts_of(node) if has_layout(node) else ()
    if len(layouts) != len(results):
        checked.fail(node, f"it has {len(results)} results and {len(layouts)} layouts")
    for layout, result in zip(layouts, results, strict=True):
        _fits(checked, node, layout, result, padded=padded)
        if node.op == "placeholder" and layout.has_partial:
            checked.fail(node, "an input is never partial")


def _needs(checked: _Checked, node: Node) -> None:
    used, needs = operands(node), needs_of(node) if has_needs(node) else ()
    if not has_needs(node) or len(needs) != len(used):
        checked.fail(node, f"it has {len(used)} operands and {len(needs)} needed layouts")
    for operand, need in zip(used, needs, strict=True):
        if is_tensor(operand):
            _fits(checked, node, need, tensor_of(operand), padded=_keeps_padding(node))


def _fits(checked: _Checked, node: Node, layout: Layout, tensor: torch.Tensor, *, padded: bool) -> None:
    if len(layout.placements) != checked.mesh.ndim:
        what = f"a layout has {len(layout.placements)} placements, the mesh {checked.mesh.ndim} axes"
        checked.fail(node, what, is_readable=False)
    is_legal = is_storable if padded else is_even
    if not is_legal(layout, tensor.shape, checked.mesh):
        checked.fail(node, f"{layout.format(checked.mesh)} does not split {format_type(tensor)}")


def _returned_as_stored(checked: _Checked, output: Output, partner: Node) -> None:
    """Check that a gradient comes back as its parameter is stored, and a buffer's new value as the old one."""
    graph, mesh = checked.graph, checked.mesh
    tensors = [o for o, value in zip(outputs_of(graph), returned(graph), strict=True) if value is not None]
    need, old = needs_of(output_node(graph))[tensors.index(output)], layout_of(partner)
    if need != old:
        layouts = f"{need.format(mesh)}, %{partner.name} has {old.format(mesh)}"
        checked.fail_ends(f"{output.role.value} {output.name!r} is needed as {layouts}")


# --- EXPLICIT and COLLECTIVE


def _edges(checked: _Checked) -> None:
    """Check that every operand has the layout that it is needed in."""
    for node in checked.graph.nodes:
        for operand, need in zip(operands(node), needs_of(node) if has_needs(node) else (), strict=False):
            if is_tensor(operand) and layout_of(operand) != need:
                has = layout_of(operand).format(checked.mesh)
                checked.fail(node, f"%{operand.name} has {has}, it needs {need.format(checked.mesh)}")


def _rows_of_rules(checked: _Checked) -> None:
    """Check that every op runs as a row of its rule says, on every axis."""
    for node in checked.graph.nodes:
        if node.op != "call_function" or not results_of(node):
            continue
        if is_step(node):
            _step(checked, node)
        elif (item := item_of(node)) is not None:
            if layout_of(node) != layouts_of(item[0])[item[1]]:
                checked.fail(node, "it has another layout than the item that it takes")
        elif not is_reshard(node):
            _op(checked, node)


def _op(checked: _Checked, node: Node) -> None:
    space = space_of(node)
    for axis, (name, size) in enumerate(zip(checked.mesh.names, checked.mesh.sizes, strict=True)):
        needs = tuple(need.on(axis) for need in needs_of(node))
        gives = tuple(layout.on(axis) for layout in layouts_of(node))
        if all(placement == R for placement in (*needs, *gives)):
            continue
        parts = 1 if _keeps_padding(node) and node.target not in PADS else size  # that a dim must be divisible by
        if not any((row.operands, row.results) == (needs, gives) for row in _rows(space, needs, gives, parts)):
            row = f"{', '.join(map(str, needs))} -> {', '.join(map(str, gives))}"
            why = "its rule has no such row" if space is not None else "no rule shards this call"
            checked.fail(node, f"on {name} it runs as {row}, but {why}")


def _step(checked: _Checked, node: Node) -> None:
    source, target, kind = layout_of(operands(node)[0]), layout_of(node), step_kind(node)
    moved = tuple(checked.mesh.index(axis) for axis in step_axes(node))
    for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
        if not (kind.moves(old, new) if axis in moved else old == new):
            checked.fail(node, f"on {checked.mesh.names[axis]} it goes from {old} to {new}")


def _no_reshards(checked: _Checked) -> None:
    for node in checked.graph.nodes:
        if is_reshard(node):
            checked.fail(node, "reshards are lowered by now")


# --- LOCAL and SCHEDULED


def _values(checked: _Checked) -> None:
    """Check that every node's value has the type that its call gives on per-device operands."""
    with fake_mode_of([value_of(node) for node in checked.graph.nodes if has_value(node)]), without_autocast():
        for node in checked.graph.nodes:
            if node.op == "call_function":
                _computed(checked, node)


def _computed(checked: _Checked, node: Node) -> None:
    assert callable(node.target)
    args, kwargs = _held(node.args), _held(node.kwargs)
    call = node.target, torch.get_default_dtype(), _types((args, kwargs), strides=True)
    if call not in _RESULTS:
        if len(_RESULTS) == MOST_CALLS:
            _RESULTS.clear()
        _RESULTS[call] = _types(node.target(*args, **kwargs))
    if _RESULTS[call] != _types(value_of(node)):
        checked.fail(node, f"the call gives {_RESULTS[call]}")


def _collectives(checked: _Checked) -> None:
    """Check that collectives name groups of this mesh, and that they are awaited before they are read."""
    for node in checked.graph.nodes:
        if is_step(node):
            checked.fail(node, "steps are functional collectives by now")
        if kind_of_op(node.target) is not None or _is_collective(node):
            _group(checked, node)
            if node.target not in OPERATORS and any(user.target is not _WAIT for user in node.users):
                checked.fail(node, "what a collective gives is read before it is awaited")


def _group(checked: _Checked, node: Node) -> None:
    """Check that a collective's group is one of the mesh, with the number of ranks that the call states."""
    transfer, kind = transfer_of(node), kind_of_op(node.target)
    if transfer is None:
        checked.fail(node, "it sends between ranks, but nothing says over which axes of the mesh")
    if node.args[-1] != checked.mesh.group_name(transfer.axes):
        checked.fail(node, f"it is no collective over {', '.join(transfer.axes)} of mesh {checked.mesh}")
    ranks = math.prod(map(checked.mesh.axis_size, transfer.axes))
    if kind is None or kind.name != transfer.kind:
        checked.fail(node, f"it is no {transfer.kind}")
    if kind.counts_ranks and node.args[-2] != ranks:
        checked.fail(node, f"it is a collective of {node.args[-2]} ranks in a group of {ranks}")


_LAWS: tuple[tuple[Stage, Stage, Callable[[_Checked], None]], ...] = (  # first stage, last stage, law
    (Stage.CAPTURED, Stage.SCHEDULED, _structure),
    (Stage.CAPTURED, Stage.SCHEDULED, _ends),
    (Stage.PLACED, Stage.COLLECTIVE, _layouts),
    (Stage.EXPLICIT, Stage.COLLECTIVE, _edges),
    (Stage.EXPLICIT, Stage.COLLECTIVE, _rows_of_rules),
    (Stage.COLLECTIVE, Stage.SCHEDULED, _no_reshards),
    (Stage.LOCAL, Stage.SCHEDULED, _values),
    (Stage.LOCAL, Stage.SCHEDULED, _collectives),
)


def _keeps_padding(node: Node) -> bool:
    """Return whether a value may be padded with zeros like stored parameters: anything but the result of a call, or a
    cast."""
    return not isinstance(node.target, OpOverload) or node.target in (torch.ops.prims.convert_element_type.default, *PADS)


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == _WAIT.namespace and node.target is not _WAIT


def _rows(space: Space | None, needs: tuple[Placement, ...], gives: tuple[Placement, ...], size: int) -> Iterator[Row]:
    """Yield the rows that could have these placements."""
    if space is None:
        return
    found = [row_sharding(space, i, placement, size) for i, placement in enumerate(needs)]
    found += [row_giving(space, i, placement, size) for i, placement in enumerate(gives)]
    yield from (row for row in found if row is not None)
    for linear in space.linear:
        yield from (linear_row(space, linear, op) for op in linear.ops)


def _held(value: Any) -> Any:
    if isinstance(value, Node):
        return value_of(value)
    if isinstance(value, tuple | list):
        return [_held(item) for item in value]
    if isinstance(value, dict):
        return {key: _held(item) for key, item in value.items()}
    return value


def _types(value: Any, *, strides: bool = False) -> str:
    """Return shapes and dtypes as text, strides only on demand: those of a result depend on the kernel."""
    if isinstance(value, torch.Tensor):
        type_ = f"{DTYPE_NAMES[value.dtype]}{list(value.shape)}"
        return f"{type_}{value.stride()}@{value.device}" if strides else type_
    if isinstance(value, tuple | list):
        return f"({', '.join(_types(item, strides=strides) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}={_types(item, strides=strides)}' for key, item in value.items())}}}"
    return repr(value)
