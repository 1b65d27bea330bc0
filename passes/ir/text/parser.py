"""The parser of graph text; `passes/ir/text/printer.py` describes the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, fake_mode
from passes.ir.collectives import kind_of_op
from passes.ir.graph import (
    SAVINGS,
    Input,
    InputRole,
    Origin,
    Output,
    OutputRole,
    Pin,
    Stage,
    Transfer,
    add_pin,
    has_layout,
    layout_given,
    operands,
    set_input,
    set_layouts,
    set_needs,
    set_note,
    set_origin,
    set_outputs,
    set_recompute,
    set_region,
    set_saving,
    set_stage,
    set_transfer,
    set_value,
)
from passes.ir.layout import Layout, parse_layout, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.text.lexer import DEVICES, DTYPES, SYMBOLS, Lines, Tokens, function_named


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
        self.needs: list[Layout | None] = []  # of the operands of the current line, in order
        self.mode = fake_mode()

    def read(self) -> GraphModule:
        while self.lines.next():
            tokens = Tokens(self.lines)
            self.needs = []
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
        layouts: list[Layout] = []
        value = self._value(tokens, layouts)
        pins = tuple(self._pins(tokens)) if tokens.accept("pinned") else ()
        recompute = tokens.accept("recompute")
        region = self._region(tokens) if tokens.accept("region") else None
        saving = next((saving for saving in SAVINGS if tokens.accept(saving)), None)
        tokens.expect("=")
        node = self._call(tokens, name.removeprefix("%"))
        tokens.expect_end()
        if f"%{node.name}" != name:
            self.lines.fail(f"{name} is not a name that FX takes; call it %{node.name}")
        self.nodes[name] = node
        set_value(node, value)
        if layouts:
            set_layouts(node, *layouts)
        for pin in pins:
            add_pin(node, pin)
        if recompute:
            set_recompute(node, True)
        if region is not None:
            set_region(node, region)
        if saving is not None:
            set_saving(node, saving)
        self._set_needs(node)
        self._comment(node, tokens.comment)

    def _region(self, tokens: Tokens) -> int:
        tokens.expect("(")
        number = tokens.integer("the number of a checkpoint() call")
        tokens.expect(")")
        return number

    def _return(self, tokens: Tokens) -> None:
        values: list[Node | None] = []
        outputs: list[Output] = []
        while tokens.kind() != "end":
            role = tokens.expect(*(role.value for role in OutputRole))
            tokens.expect("(")
            outputs.append(Output(OutputRole(role), tokens.string("the output's name in quotes")))
            tokens.expect(")")
            values.append(self._operand(tokens) if tokens.kind() == "node" else None)
            if values[-1] is None:
                tokens.expect("None")
            if not tokens.accept(","):
                tokens.expect_end()
        node = self.graph.output(tuple(values))
        set_outputs(self.graph, tuple(outputs))
        self._set_needs(node)

    def _value(self, tokens: Tokens, layouts: list[Layout]) -> Any:
        if tokens.peek() in ("[", "("):
            end = {"[": "]", "(": ")"}[tokens.take()]
            items = [self._value(tokens, layouts) for _ in tokens.items(end)]
            return items if end == "]" else tuple(items)
        if tokens.peek() not in DTYPES:
            return self._symbol(tokens, "a type such as f32[8, 4]")
        value = self._tensor(tokens)
        if tokens.kind() == "layout":
            layouts.append(self._layout(tokens))
        return value

    def _tensor(self, tokens: Tokens) -> torch.Tensor:
        dtype = DTYPES[tokens.take()]
        tokens.expect("[")
        shape = [tokens.integer("a size") for _ in tokens.items("]")]
        contiguous = not tokens.accept("<")
        stride = [] if contiguous else [tokens.integer("a stride") for _ in tokens.items(">")]
        device = self._device(tokens) if tokens.accept("@") else torch.device("cpu")
        with self.mode:
            if contiguous:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def _device(self, tokens: Tokens) -> torch.device:
        kind = tokens.take()
        if kind not in DEVICES:
            self.lines.fail(f"unknown device {kind!r}; one of {', '.join(DEVICES)}")
        if not tokens.accept(":"):
            return torch.device(kind)
        return torch.device(kind, tokens.integer("the number of a device"))

    def _symbol(self, tokens: Tokens, what: str) -> Any:
        if tokens.kind() == "number":
            text = tokens.take()
            return float(text) if set(text) & set(".en") else int(text)
        if tokens.peek() not in SYMBOLS:
            tokens.fail(what)
        return SYMBOLS[tokens.take()]

    def _layout(self, tokens: Tokens) -> Layout:
        with self.lines.located():
            return parse_layout(tokens.take(), self.mesh)

    def _pins(self, tokens: Tokens) -> Iterator[Pin]:
        tokens.expect("(")
        for _ in tokens.items(")"):
            axis, placement = tokens.expect_kind("word", "an axis"), ""
            tokens.expect(":")
            while tokens.kind() not in ("string", "end"):
                placement += tokens.take()
            reason = tokens.string("a reason in quotes")
            with self.lines.located():
                yield Pin(self.mesh.index(axis), parse_placement(placement), reason)

    def _call(self, tokens: Tokens, name: str) -> Node:
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
                kwargs[keyword] = self._argument(tokens)
            else:
                args.append(self._argument(tokens))
        node = self.graph.create_node("call_function", self._target(target), tuple(args), kwargs, name)
        kind = kind_of_op(node.target)
        if kind is not None and isinstance(args[-1], str):
            with self.lines.located():
                set_transfer(node, Transfer(kind.name, self.mesh.axes_of_group(args[-1])))
        return node

    def _argument(self, tokens: Tokens) -> Any:
        match tokens.kind(), tokens.peek():
            case "node", _:
                return self._operand(tokens)
            case "string", _:
                return tokens.string("a string")
            case _, "[":
                tokens.take()
                return [self._argument(tokens) for _ in tokens.items("]")]
            case _, "(":
                tokens.take()
                return tuple([self._argument(tokens) for _ in tokens.items(")")])
            case _, "device":
                tokens.take()
                tokens.expect("(")
                device = self._device(tokens)
                tokens.expect(")")
                return device
            case _, "complex":
                tokens.take()
                tokens.expect("(")
                return complex(*[self._symbol(tokens, "a number") for _ in tokens.items(")")])
        return self._symbol(tokens, "an argument")

    def _operand(self, tokens: Tokens) -> Node:
        name = tokens.take()
        if name not in self.nodes:
            self.lines.fail(f"{name} is not defined above")
        self.needs.append(self._layout(tokens) if tokens.kind() == "layout" else None)
        return self.nodes[name]

    def _target(self, text: str) -> Callable[..., Any]:
        if (function := function_named(text)) is not None:
            return function
        first, *rest = text.split(".")
        readings = [("aten", first, *(rest or ["default"]))] if len(rest) < 2 else []
        readings += [(first, *rest, "default")[:3]] if rest else []
        for namespace, name, overload in readings:
            op = _op(namespace, name, overload)
            if op is not None:
                return op
        self.lines.fail(f"unknown op {text!r}; a custom op has to be registered (imported) before its graph is read")

    def _set_needs(self, node: Node) -> None:
        if not Stage.PLACED <= self.stage <= Stage.COLLECTIVE or node.op == "placeholder":
            return
        used = operands(node)
        if all(has_layout(operand) for operand in used):
            written = zip(used, self.needs, strict=True)
            set_needs(node, tuple(need or layout_given(node, operand) for operand, need in written))

    def _comment(self, node: Node, comment: str) -> None:
        origin, _, note = comment.partition("|")
        if note:
            set_note(node, note.strip())
        found = re.fullmatch(r"(?:(?P<file>.+?):(?P<line>\d+))?\s*(?P<fqn>\S*)", origin.strip())
        if found is not None and found[0]:
            set_origin(node, Origin(found["fqn"], found["file"] or "", int(found["line"] or 0)))


def _op(namespace: str, name: str, overload: str) -> OpOverload | None:
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        return None
    return op if isinstance(op, OpOverload) else None
