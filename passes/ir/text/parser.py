"""The parser of graph text; `passes/ir/text/printer.py` describes the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, fake_mode
from passes.ir.collectives import kind_of_op
from passes.ir.graph import (
    Input,
    InputRole,
    Origin,
    Output,
    OutputRole,
    Stage,
    Transfer,
    has_layout,
    layout_given,
    operands,
    set_input,
    set_needs,
    set_note,
    set_origin,
    set_outputs,
    set_stage,
    set_transfer,
)
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.text.annotations import read_annotations, read_device, read_layout, read_symbol
from passes.ir.text.lexer import Lines, Tokens, function_named


def parse_graph(text: str) -> tuple[GraphModule, Mesh]:
    """Return the graph that `format_graph` wrote; its values are fake tensors. Raises GraphTextError, which names the
    line."""
    lines = Lines(text)
    mesh = parse_mesh(lines)
    stage = parse_stage(lines)
    return Reader(lines, mesh, stage).read(), mesh


def parse_mesh(lines: Lines) -> Mesh:
    found = re.fullmatch(r"mesh (\S+)(?: ranks ([\d,]+))?", lines.text) if lines.next() else None
    if found is None:
        lines.fail("a graph starts with its mesh, such as 'mesh dp=2,tp=2'")
    with lines.located():
        return Mesh(found[1], ranks=tuple(map(int, found[2].split(","))) if found[2] else None)


def parse_stage(lines: Lines) -> Stage:
    found = re.fullmatch(r"stage (\w+)", lines.text) if lines.next() else None
    if found is None or found[1] not in Stage.__members__:
        lines.fail(f"the second line is the stage, 'stage' and one of {', '.join(Stage.__members__)}")
    return Stage[found[1]]


class Reader:
    """Reads node lines into a graph."""

    def __init__(self, lines: Lines, mesh: Mesh, stage: Stage) -> None:
        self.lines, self.mesh, self.stage = lines, mesh, stage
        self.graph = Graph()
        self.nodes: dict[str, Node] = {}
        self.mode = fake_mode()

    def read(self) -> GraphModule:
        while self.lines.next():
            tokens = Tokens(self.lines)
            if tokens.accept("return"):
                self._return(tokens)
                break
            self._node(tokens)
        else:
            self.lines.fail("a graph ends in 'return'")
        if self.lines.next():
            self.lines.fail("nothing comes after 'return'")
        gm = GraphModule(torch.nn.Module(), self.graph)
        set_stage(gm, self.stage)
        return gm

    def _node(self, tokens: Tokens) -> None:
        name = tokens.expect_kind("node", "'%name: type = op(...)' or 'return'")
        if name in self.nodes:
            self.lines.fail(f"{name} is defined twice")
        tokens.expect(":")
        annotations = read_annotations(tokens, self.mesh, self.mode)
        tokens.expect("=")
        operands_read = _Operands(self.nodes, self.mesh)
        node = self._call(tokens, name.removeprefix("%"), operands_read)
        tokens.expect_end()
        if f"%{node.name}" != name:
            self.lines.fail(f"{name} is not a name that FX takes; call it %{node.name}")
        self.nodes[name] = node
        annotations.write_to(node)
        operands_read.write_to(node, self.stage)
        _write_comment(tokens.comment, node)

    def _return(self, tokens: Tokens) -> None:
        operands_read = _Operands(self.nodes, self.mesh)
        values: list[Node | None] = []
        outputs: list[Output] = []
        while tokens.kind() != "end":
            role = tokens.expect(*(role.value for role in OutputRole))
            tokens.expect("(")
            outputs.append(Output(OutputRole(role), tokens.string("the output's name in quotes")))
            tokens.expect(")")
            values.append(operands_read.operand(tokens) if tokens.kind() == "node" else None)
            if values[-1] is None:
                tokens.expect("None")
            if not tokens.accept(","):
                tokens.expect_end()
        node = self.graph.output(tuple(values))
        set_outputs(self.graph, tuple(outputs))
        operands_read.write_to(node, self.stage)

    def _call(self, tokens: Tokens, name: str, operands_read: _Operands) -> Node:
        target = tokens.expect_kind("word", "an op")
        tokens.expect("(")
        if target in {role.value for role in InputRole}:
            node = self.graph.create_node("placeholder", name, name=name)
            set_input(node, Input(InputRole(target), tokens.string("the input's name in quotes")))
            tokens.expect(")")
            return node
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for _ in tokens.items(")"):
            if tokens.kind() == "word" and tokens.peek(1) == "=":
                keyword = tokens.take()
                tokens.expect("=")
                kwargs[keyword] = operands_read.argument(tokens)
            else:
                args.append(operands_read.argument(tokens))
        node = self.graph.create_node("call_function", _target(target, self.lines), tuple(args), kwargs, name)
        kind = kind_of_op(node.target)
        if kind is not None and isinstance(args[-1], str):
            with self.lines.located():
                set_transfer(node, Transfer(kind.name, self.mesh.axes_of_group(args[-1])))
        return node


class _Operands:
    """The operands of one line: nodes that stand above it, and the layouts in which they are needed."""

    def __init__(self, nodes: Mapping[str, Node], mesh: Mesh) -> None:
        self.nodes, self.mesh = nodes, mesh
        self.needs: list[Layout | None] = []  # in order

    def argument(self, tokens: Tokens) -> Any:
        """Read an argument of a call."""
        match tokens.kind(), tokens.peek():
            case "node", _:
                return self.operand(tokens)
            case "string", _:
                return tokens.string("a string")
            case _, "[":
                tokens.take()
                return [self.argument(tokens) for _ in tokens.items("]")]
            case _, "(":
                tokens.take()
                return tuple([self.argument(tokens) for _ in tokens.items(")")])
            case _, "device":
                tokens.take()
                tokens.expect("(")
                device = read_device(tokens)
                tokens.expect(")")
                return device
            case _, "complex":
                tokens.take()
                tokens.expect("(")
                return complex(*[read_symbol(tokens, "a number") for _ in tokens.items(")")])
        return read_symbol(tokens, "an argument")

    def operand(self, tokens: Tokens) -> Node:
        """Read the name of a node, and the layout in which it is needed."""
        name = tokens.take()
        if name not in self.nodes:
            tokens.lines.fail(f"{name} is not defined above")
        self.needs.append(read_layout(tokens, self.mesh) if tokens.kind() == "layout" else None)
        return self.nodes[name]

    def write_to(self, node: Node, stage: Stage) -> None:
        """Set the layouts that a node needs its operands in; where none is written, it is the operand's own."""
        if not Stage.PLACED <= stage <= Stage.COLLECTIVE or node.op == "placeholder":
            return
        used = operands(node)
        if all(has_layout(operand) for operand in used):
            written = zip(used, self.needs, strict=True)
            set_needs(node, tuple(need or layout_given(node, operand) for operand, need in written))


def _target(text: str, lines: Lines) -> Callable[..., Any]:
    """Return the function or op that is written as `text`."""
    if (function := function_named(text)) is not None:
        return function
    first, *rest = text.split(".")
    readings = [("aten", first, *(rest or ["default"]))] if len(rest) < 2 else []
    readings += [(first, *rest, "default")[:3]] if rest else []
    for namespace, name, overload in readings:
        op = _op(namespace, name, overload)
        if op is not None:
            return op
    lines.fail(f"unknown op {text!r}; a custom op has to be registered (imported) before its graph is read")


def _op(namespace: str, name: str, overload: str) -> OpOverload | None:
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        return None
    return op if isinstance(op, OpOverload) else None


def _write_comment(comment: str, node: Node) -> None:
    """Set the origin of a node, and the note that follows it: `file.py:12 layers.0 | note`."""
    origin, _, note = comment.partition("|")
    if note:
        set_note(node, note.strip())
    found = re.fullmatch(r"(?P<file>.+?):(?P<line>\d+)(?:\s+(?P<fqn>.*))?|(?P<alone>\S+)", origin.strip())
    if found is not None:  # a name with spaces is told from words of a comment by the place before it
        set_origin(node, Origin(found["fqn"] or found["alone"] or "", found["file"] or "", int(found["line"] or 0)))
