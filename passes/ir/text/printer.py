"""The printer of graphs as text: one language for dumps, golden tests, error messages and bug reports.

    mesh dp=2,tp=2
    stage EXPLICIT
    %w: f32[16, 8] {dp:S(0), tp:R} pinned(dp:S(0) "fsdp: stored sharded") = parameter("layers.0.w")
    %x: f32[8, 16] {dp:S(0), tp:R} = input("tokens")
    %reshard: f32[16, 8] {dp:R, tp:R} recompute = reshard(%w)      # mlp.py:14 layers.0 | seed: gathered for use
    %mm: f32[8, 8] {dp:S(0), tp:R} = mm(%x, %reshard)      # mlp.py:14 layers.0
    return output("loss") %mm, gradient("layers.0.w") None

A line is a node: its name, the type of its value, its layout (from PLACED on), its pins, and the call. ATen's ops are
written without `aten.` and `.default`. An operand that is needed in another layout than it has is written with the
needed one: `mm(%x{dp:S(0), tp:S(1)}, %w)`. Strides are written if a value is not contiguous, `f32[8, 4]<1, 8>`, and
the device if it is not the CPU, `f32[8, 4]@cuda:0`. The comment is the origin, then the note.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload
from passes.errors import CompilerError
from passes.ir.graph import (
    has_layout,
    has_needs,
    input_of,
    is_recompute,
    layout_given,
    layouts_of,
    needs_of,
    note_of,
    operands,
    origin_of,
    outputs_of,
    pins_of,
    region_of,
    results_of,
    returned,
    saving_of,
    stage_of,
    value_of,
)
from passes.ir.mesh import Mesh
from passes.ir.text.lexer import DTYPE_NAMES, name_of_function

WIDTH = 120  # characters; a longer return line is written one value per line
GAP = " " * 6  # before a comment
_NUMBERS = (int, float, bool, type(None))


def format_graph(gm: GraphModule, mesh: Mesh) -> str:
    """Return the graph as text, one line per node, ending in a newline; `parse_graph` reads it back."""
    lines = [f"mesh {mesh}"]
    if mesh.ranks != tuple(range(mesh.size)):
        lines = [f"mesh {mesh} ranks {','.join(map(str, mesh.ranks))}"]
    lines.append(f"stage {stage_of(gm).name}")
    lines += [format_node(node, mesh) for node in gm.graph.nodes]
    return "\n".join(lines) + "\n"


def format_node(node: Node, mesh: Mesh) -> str:
    """Return one line of `format_graph`."""
    if node.op == "output":
        return _format_return(node, mesh)
    head = f"%{node.name}: {_format_value(node, mesh)}{_format_pins(node, mesh)}"
    if is_recompute(node):
        head += " recompute"
    if region_of(node) is not None:
        head += f" region({region_of(node)})"
    if saving_of(node):
        head += f" {saving_of(node)}"
    return f"{head} = {_format_call(node, mesh)}{_format_comment(node)}"


def format_type(value: torch.Tensor) -> str:
    """Return `f32[8, 4]`."""
    stride = None if value.is_contiguous() else value.stride()
    return _format_type(value.dtype, value.shape, stride, value.device)


@lru_cache(maxsize=1 << 14)
def _format_type(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...] | None, device: torch.device) -> str:
    text = f"{DTYPE_NAMES[dtype]}[{', '.join(map(str, shape))}]"
    if stride is not None:
        text += f"<{', '.join(map(str, stride))}>"
    return text if device.type == "cpu" else f"{text}@{device}"


@lru_cache(maxsize=1 << 12)
def format_target(target: object) -> str:
    """Return `mm`, `add.Tensor`, `prims.iota`, `reshard`."""
    if isinstance(target, OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    name = name_of_function(target)
    if name is not None:
        return name
    raise CompilerError(f"a graph calls {target!r}, which is neither an op nor in passes/ir/text/lexer.py")


def _format_value(node: Node, mesh: Mesh) -> str:
    value = value_of(node)
    layouts = iter(layouts_of(node) if has_layout(node) else ())

    def typed(one: Any) -> str:
        if isinstance(one, torch.Tensor):
            layout = next(layouts, None)
            return format_type(one) + (f" {layout.format(mesh)}" if layout is not None else "")
        return _format_argument(one)

    if isinstance(value, list):
        return f"[{', '.join(map(typed, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(typed, value))}{',' if len(value) == 1 else ''})"
    return typed(value)


def _format_pins(node: Node, mesh: Mesh) -> str:
    pins = (f"{mesh.names[pin.axis]}:{pin.placement} {json.dumps(pin.reason)}" for pin in pins_of(node))
    return f" pinned({', '.join(pins)})" if pins_of(node) else ""


def _format_call(node: Node, mesh: Mesh) -> str:
    if node.op == "placeholder":
        described = input_of(node)
        return f"{described.role.value}({json.dumps(described.name)})"
    if node.op != "call_function":
        raise CompilerError(f"%{node.name} is a {node.op}; a graph has placeholders, calls of functions and one output")
    needs = _Needs(node, mesh) if has_needs(node) else None
    arguments = [_format_argument(arg, needs) for arg in node.args]
    arguments += [f"{name}={_format_argument(arg, needs)}" for name, arg in node.kwargs.items()]
    return f"{format_target(node.target)}({', '.join(arguments)})"


class _Needs:
    """The needed layouts of a node's operands, given out in the order of `operands`."""

    def __init__(self, node: Node, mesh: Mesh) -> None:
        needs = needs_of(node) if has_needs(node) else ()
        used = operands(node)
        self.mesh = mesh
        self.pairs = iter([(node, *pair) for pair in zip(used, needs, strict=False)])

    def suffix(self, operand: Node) -> str:
        """Return `{tp:R}` if the operand is needed in another layout than it has."""
        user, used, need = next(self.pairs, (operand, operand, None))
        assert used is operand
        if need is None or not has_layout(operand) or not results_of(operand):
            return ""
        if len(layouts_of(operand)) != 1 or layout_given(user, operand) == need:
            return ""
        return need.format(self.mesh)


def _format_argument(value: Any, needs: _Needs | None = None) -> str:
    if type(value) in _NUMBERS:  # most arguments are
        return repr(value)
    match value:
        case Node():
            return f"%{value.name}{needs.suffix(value) if needs is not None else ''}"
        case list():
            return f"[{', '.join(_format_argument(item, needs) for item in value)}]"
        case tuple():
            items = ", ".join(_format_argument(item, needs) for item in value)
            return f"({items}{',' if len(value) == 1 else ''})"
        case str():
            return json.dumps(value)
        case torch.dtype():
            return DTYPE_NAMES[value]
        case torch.device():
            return f"device({value})"
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case int() | float() | torch.layout() | torch.memory_format():
            return repr(value)
    raise CompilerError(f"cannot write {value!r}, a {type(value).__name__}, as an argument in graph text")


def _format_return(node: Node, mesh: Mesh) -> str:
    needs = _Needs(node, mesh)
    outputs = zip(outputs_of(node.graph), returned(node.graph), strict=True)
    items = [f"{o.role.value}({json.dumps(o.name)}) {_format_argument(value, needs)}" for o, value in outputs]
    line = f"return {', '.join(items)}".rstrip()
    return line if len(line) <= WIDTH else "return " + (",\n" + " " * len("return ")).join(items)


def _format_comment(node: Node) -> str:
    origin, note = str(origin_of(node)), " ".join(note_of(node).split())
    parts = [origin] if origin else []
    parts += [f"| {note}"] if note else []
    return f"{GAP}# {' '.join(parts)}" if parts else ""
