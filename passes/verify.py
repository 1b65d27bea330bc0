"""What must hold of a graph at its stage; a pass that breaks it is found behind that pass, by name of the node.

This stands above `passes/ir`, because from EXPLICIT on a graph is held against the sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload, fake_mode_of
from passes.errors import VerifyError
from passes.ir.collectives import is_step, kind_of_op, step_axes, step_kind
from passes.ir.graph import (
    Input,
    InputRole,
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
from passes.ir.mesh import Mesh
from passes.ir.one_operator import OPERATORS
from passes.ir.text import DTYPE_NAMES, format_node, format_type, name_of_function
from passes.rules.rule import Row, Space, linear_row, row_giving, row_sharding, space_of

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def verify(gm: GraphModule, mesh: Mesh) -> None:
    """Check all that must hold of `gm` at its stage. Raises VerifyError, which names the node and the stage."""
    check = _Check(gm, mesh)
    check.structure()
    check.ends()
    if Stage.PLACED <= check.stage <= Stage.COLLECTIVE:
        check.layouts()
    if Stage.EXPLICIT <= check.stage <= Stage.COLLECTIVE:
        check.edges()
        check.rows()
    if check.stage >= Stage.COLLECTIVE:
        check.no_reshards()
    if check.stage >= Stage.LOCAL:
        check.local()


class _Check:
    """The checks, each on the whole graph; `verify` says which hold at which stage."""

    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        self.graph, self.mesh, self.stage = gm.graph, mesh, stage_of(gm)
        self.is_readable = False  # whether nodes have what it takes to write them
        self.made: dict[str, str] = {}  # what a call gives, by the call: layers repeat

    def fail(self, node: Node, what: str, *, is_readable: bool = True) -> NoReturn:
        origin = origin_of(node)
        lines = [f"at stage {self.stage.name}, %{node.name} is not valid: {what}"]
        lines += [f"    {format_node(node, self.mesh)}"] if self.is_readable and is_readable else []
        lines += [f"    {origin.source.strip()}"] if origin.source.strip() else []
        raise VerifyError("\n".join(lines))

    # --- every stage

    def structure(self) -> None:
        """The graph is flat and in order; every node has what its kind has."""
        try:
            self.graph.lint()
        except RuntimeError as error:
            raise VerifyError(f"at stage {self.stage.name}, the graph is broken: {error}") from error
        roles: dict[Input, Node] = {}
        called = False
        for node in self.graph.nodes:
            match node.op:
                case "placeholder":
                    self._placeholder(node, roles)
                    if called:
                        self.fail(node, "placeholders stand in front of all calls")
                case "call_function":
                    self._call(node)
                    called = True
                case "output":
                    pass
                case _:
                    self.fail(node, f"it is a {node.op}; a graph has placeholders, calls of functions and one output")
        self.is_readable = True

    def _placeholder(self, node: Node, roles: dict[Input, Node]) -> None:
        if not has_input(node):
            self.fail(node, "a placeholder without a role")
        if not has_value(node):
            self.fail(node, "it has no value")
        twin = roles.setdefault(input_of(node), node)
        if twin is not node:
            self.fail(node, f"%{twin.name} is {input_of(node).role.value} {input_of(node).name!r} as well")

    def _call(self, node: Node) -> None:
        if not isinstance(node.target, OpOverload) and name_of_function(node.target) is None:
            self.fail(node, f"it calls {node.target}, which is neither an op nor in passes/ir/text/lexer.py")
        if not has_value(node):
            self.fail(node, "it has no value")

    def ends(self) -> None:
        """Outputs are described, in order, and have the type of the input that they belong to."""
        if not has_outputs(self.graph):
            self.fail_ends("they are not described")
        values, outputs = returned(self.graph), outputs_of(self.graph)
        if len(values) != len(outputs):
            self.fail_ends(f"{len(values)} values have {len(outputs)} descriptions")
        order = [list(OutputRole).index(output.role) for output in outputs]
        if order != sorted(order):
            self.fail_ends("outputs come first, then buffers, gradients and what is saved")
        for value, output in zip(values, outputs, strict=True):
            if value is None and output.role is not OutputRole.GRADIENT:
                self.fail_ends(f"{output.role.value} {output.name!r} is None")
        for value, output, partner in self._partners():
            new, old = tensor_of(value), tensor_of(partner)
            if new.shape != old.shape or new.dtype != old.dtype:
                types = f"%{value.name} is {format_type(new)}, %{partner.name} is {format_type(old)}"
                self.fail_ends(
                    f"{output.role.value} {output.name!r} is unlike its {input_of(partner).role.value}: {types}"
                )

    def _partners(self) -> Iterator[tuple[Node, Output, Node]]:
        """Each returned value with the input that it belongs to, where there is one."""
        inputs = {input_of(node): node for node in placeholders(self.graph)}
        for value, output in zip(returned(self.graph), outputs_of(self.graph), strict=True):
            partner = inputs.get(_partner(output))
            if isinstance(value, Node) and partner is not None:
                yield value, output, partner

    def fail_ends(self, what: str) -> NoReturn:
        raise VerifyError(f"at stage {self.stage.name}, the outputs are not valid: {what}")

    # --- PLACED to COLLECTIVE

    def layouts(self) -> None:
        """Every tensor has a layout that its shape allows, every operand a needed one."""
        stored = {value for value, output, _ in self._partners() if output.role is not OutputRole.OUTPUT}
        for node in self.graph.nodes:
            if node.op != "output" and results_of(node):
                self._layouts(node, padded=node in stored or _keeps_padding(node))
            if node.op == "output" or (node.op == "call_function" and results_of(node)):
                self._needs(node)
        for _, output, partner in self._partners():
            self._returned(output, partner)

    def _layouts(self, node: Node, *, padded: bool) -> None:
        results = results_of(node)
        if not has_layout(node) or len(layouts_of(node)) != len(results):
            self.fail(
                node, f"it has {len(results)} results and {len(layouts_of(node)) if has_layout(node) else 0} layouts"
            )
        for layout, result in zip(layouts_of(node), results, strict=True):
            self._fits(node, layout, result, padded=padded)
            if node.op == "placeholder" and layout.has_partial:
                self.fail(node, "an input is never partial")

    def _needs(self, node: Node) -> None:
        used = operands(node)
        if not has_needs(node) or len(needs_of(node)) != len(used):
            self.fail(
                node, f"it has {len(used)} operands and {len(needs_of(node)) if has_needs(node) else 0} needed layouts"
            )
        for operand, need in zip(used, needs_of(node), strict=True):
            if is_tensor(operand):
                self._fits(node, need, tensor_of(operand), padded=_keeps_padding(node))

    def _fits(self, node: Node, layout: Layout, tensor: torch.Tensor, *, padded: bool) -> None:
        if len(layout.placements) != self.mesh.ndim:
            what = f"a layout has {len(layout.placements)} placements, the mesh {self.mesh.ndim} axes"
            self.fail(node, what, is_readable=False)
        if is_even(layout, tensor.shape, self.mesh):
            return
        if not padded or not is_storable(layout, tensor.shape, self.mesh):
            self.fail(node, f"{layout.format(self.mesh)} does not split {format_type(tensor)}")

    def _returned(self, output: Output, partner: Node) -> None:
        """A gradient comes back as its parameter is stored, a buffer's new value as the old one."""
        node = output_node(self.graph)
        tensors = [
            o for o, value in zip(outputs_of(self.graph), returned(self.graph), strict=True) if value is not None
        ]
        need, old = needs_of(node)[tensors.index(output)], layout_of(partner)
        if need != old:
            layouts = f"{need.format(self.mesh)}, %{partner.name} has {old.format(self.mesh)}"
            self.fail_ends(f"{output.role.value} {output.name!r} is needed as {layouts}")

    # --- EXPLICIT and COLLECTIVE

    def edges(self) -> None:
        """Every operand has the layout that it is needed in."""
        for node in self.graph.nodes:
            for operand, need in zip(operands(node), needs_of(node) if has_needs(node) else (), strict=False):
                if is_tensor(operand) and layout_of(operand) != need:
                    has = layout_of(operand).format(self.mesh)
                    self.fail(node, f"%{operand.name} has {has}, it needs {need.format(self.mesh)}")

    def rows(self) -> None:
        """Every op runs as a row of its rule says, on every axis."""
        for node in self.graph.nodes:
            if node.op != "call_function" or not results_of(node):
                continue
            if is_step(node):
                self._step(node)
            elif (item := item_of(node)) is not None:
                if layout_of(node) != layouts_of(item[0])[item[1]]:
                    self.fail(node, "it has another layout than the item that it takes")
            elif not is_reshard(node):
                self._op(node)

    def _op(self, node: Node) -> None:
        space = space_of(node)
        for axis, (name, size) in enumerate(zip(self.mesh.names, self.mesh.sizes, strict=True)):
            needs = tuple(need.on(axis) for need in needs_of(node))
            gives = tuple(layout.on(axis) for layout in layouts_of(node))
            if all(placement == R for placement in (*needs, *gives)):
                continue
            parts = 1 if _keeps_padding(node) else size  # that a dim has to be cut into
            if not any((row.operands, row.results) == (needs, gives) for row in _rows(space, needs, gives, parts)):
                row = f"{', '.join(map(str, needs))} -> {', '.join(map(str, gives))}"
                why = "its rule has no such row" if space is not None else "no rule shards this call"
                self.fail(node, f"on {name} it runs as {row}, but {why}")

    def _step(self, node: Node) -> None:
        source, target = layout_of(operands(node)[0]), layout_of(node)
        kind = step_kind(node)
        moved = tuple(self.mesh.index(axis) for axis in step_axes(node))
        for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
            fits = kind.moves(old, new) if axis in moved else old == new
            if not fits:
                self.fail(node, f"on {self.mesh.names[axis]} it goes from {old} to {new}")

    def no_reshards(self) -> None:
        for node in self.graph.nodes:
            if is_reshard(node):
                self.fail(node, "reshards are lowered by now")

    # --- LOCAL and SCHEDULED

    def local(self) -> None:
        """Every value is what its call gives on per-device operands; collectives name groups of this mesh."""
        values = [value_of(node) for node in self.graph.nodes if has_value(node)]
        with fake_mode_of(values):
            for node in self.graph.nodes:
                if node.op == "call_function":
                    self._computed(node)
        for node in self.graph.nodes:
            if is_step(node):
                self.fail(node, "steps are functional collectives by now")
            if kind_of_op(node.target) is not None or _is_collective(node):
                self._group(node)
                if node.target not in OPERATORS and any(user.target is not _WAIT for user in node.users):
                    self.fail(node, "what a collective gives is read before it is awaited")

    def _group(self, node: Node) -> None:
        """All ranks of a collective's group run this program: it is one of the mesh's, and as large as the call says."""
        transfer = transfer_of(node)
        if transfer is None:
            self.fail(node, "it sends between ranks, but nothing says over which axes of the mesh")
        if node.args[-1] != self.mesh.group_name(transfer.axes):
            self.fail(node, f"it is no collective over {', '.join(transfer.axes)} of mesh {self.mesh}")
        ranks = math.prod(map(self.mesh.axis_size, transfer.axes))
        kind = kind_of_op(node.target)
        if kind is None or kind.name != transfer.kind:
            self.fail(node, f"it is no {transfer.kind}")
        if kind.counts_ranks and node.args[-2] != ranks:
            self.fail(node, f"it is a collective of {node.args[-2]} ranks in a group of {ranks}")

    def _computed(self, node: Node) -> None:
        assert callable(node.target)
        args, kwargs = _held(node.args), _held(node.kwargs)
        call = f"{node.target} {_types((args, kwargs), strides=True)}"
        if call not in self.made:
            self.made[call] = _types(node.target(*args, **kwargs))
        if self.made[call] != _types(value_of(node)):
            self.fail(node, f"the call gives {self.made[call]}")


def _keeps_padding(node: Node) -> bool:
    """Whether a value may be padded with zeros as parameters are stored: not what a call makes of it, but for a cast."""
    return not isinstance(node.target, OpOverload) or node.target is torch.ops.prims.convert_element_type.default


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == _WAIT.namespace and node.target is not _WAIT


def _partner(output: Output) -> Input:
    if output.role is OutputRole.BUFFER:
        return Input(InputRole.BUFFER, output.name)
    if output.role is OutputRole.OUTPUT:
        return Input(InputRole.TANGENT, output.name)
    if output.role is OutputRole.SAVED:
        return Input(InputRole.SAVED, output.name)
    path = output.name.removeprefix("input:")
    return Input(InputRole.PARAMETER if path == output.name else InputRole.INPUT, path)


def _rows(space: Space | None, needs: tuple[Placement, ...], gives: tuple[Placement, ...], size: int) -> Iterator[Row]:
    """The rows that could have these placements."""
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
    """Shapes and dtypes, as text; what strides a call gives is the implementation's choice."""
    if isinstance(value, torch.Tensor):
        type_ = f"{DTYPE_NAMES[value.dtype]}{list(value.shape)}"
        return f"{type_}{value.stride()}@{value.device}" if strides else type_
    if isinstance(value, tuple | list):
        return f"({', '.join(_types(item, strides=strides) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}={_types(item, strides=strides)}' for key, item in value.items())}}}"
    return repr(value)
