"""Read what a line of graph text says of a node before its call: type, layouts, pins and marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes._torch import FakeTensorMode
from passes.ir.graph import SAVINGS, Pin, Saving, add_pin, set_layouts, set_recompute, set_region, set_saving, set_value
from passes.ir.layout import Layout, parse_layout, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.text.lexer import ALL_DTYPES, DEVICES, SYMBOLS, Tokens


@dataclass(frozen=True)
class Annotations:
    """The facts of a node that stand between its name and its call."""

    value: Any
    layouts: tuple[Layout, ...]
    pins: tuple[Pin, ...]
    is_recompute: bool
    region: int | None
    saving: Saving | None

    def write_to(self, node: Node) -> None:
        """Set the facts of a node."""
        set_value(node, self.value)
        if self.layouts:
            set_layouts(node, *self.layouts)
        for pin in self.pins:
            add_pin(node, pin)
        if self.is_recompute:
            set_recompute(node, True)
        if self.region is not None:
            set_region(node, self.region)
        if self.saving is not None:
            set_saving(node, self.saving)


def read_annotations(tokens: Tokens, mesh: Mesh, mode: FakeTensorMode) -> Annotations:
    """Read the type of a value, and the words that follow it; tensors are made in `mode`."""
    layouts: list[Layout] = []
    return Annotations(
        _read_value(tokens, mesh, mode, layouts),
        tuple(layouts),
        tuple(_read_pins(tokens, mesh)) if tokens.accept("pinned") else (),
        tokens.accept("recompute"),
        _read_region(tokens) if tokens.accept("region") else None,
        next((saving for saving in SAVINGS if tokens.accept(saving)), None),
    )


def read_layout(tokens: Tokens, mesh: Mesh) -> Layout:
    """Read a layout: `{dp:S(0), tp:R}`."""
    with tokens.lines.located():
        return parse_layout(tokens.take(), mesh)


def read_device(tokens: Tokens) -> torch.device:
    """Read a device: `cpu` or `cuda:1`."""
    kind = tokens.take()
    if kind not in DEVICES:
        tokens.lines.fail(f"unknown device {kind!r}; one of {', '.join(DEVICES)}")
    if not tokens.accept(":"):
        return torch.device(kind)
    return torch.device(kind, tokens.integer("the number of a device"))


def read_symbol(tokens: Tokens, what: str) -> Any:
    """Read a number, a dtype, or another value with a name of its own; an error says that `what` was expected."""
    if tokens.kind() == "number":
        text = tokens.take()
        return float(text) if set(text) & set(".en") else int(text)
    if tokens.peek() not in SYMBOLS:
        tokens.fail(what)
    return SYMBOLS[tokens.take()]


def _read_value(tokens: Tokens, mesh: Mesh, mode: FakeTensorMode, layouts: list[Layout]) -> Any:
    """Read the type of a value, or of several; their layouts are added to `layouts`."""
    if tokens.peek() in ("[", "("):
        end = {"[": "]", "(": ")"}[tokens.take()]
        items = [_read_value(tokens, mesh, mode, layouts) for _ in tokens.items(end)]
        return items if end == "]" else tuple(items)
    if tokens.peek() not in ALL_DTYPES:
        return read_symbol(tokens, "a type such as f32[8, 4]")
    value = _read_tensor(tokens, mode)
    if tokens.kind() == "layout":
        layouts.append(read_layout(tokens, mesh))
    return value


def _read_tensor(tokens: Tokens, mode: FakeTensorMode) -> torch.Tensor:
    dtype = ALL_DTYPES[tokens.take()]
    tokens.expect("[")
    shape = [tokens.integer("a size") for _ in tokens.items("]")]
    contiguous = not tokens.accept("<")
    stride = [] if contiguous else [tokens.integer("a stride") for _ in tokens.items(">")]
    device = read_device(tokens) if tokens.accept("@") else torch.device("cpu")
    with mode:
        if contiguous:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _read_pins(tokens: Tokens, mesh: Mesh) -> Iterator[Pin]:
    tokens.expect("(")
    for _ in tokens.items(")"):
        axis, placement = tokens.expect_kind("word", "an axis"), ""
        tokens.expect(":")
        while tokens.kind() not in ("string", "end"):
            placement += tokens.take()
        reason = tokens.string("a reason in quotes")
        with tokens.lines.located():
            yield Pin(mesh.index(axis), parse_placement(placement), reason)


def _read_region(tokens: Tokens) -> int:
    tokens.expect("(")
    number = tokens.integer("the number of a checkpoint() call")
    tokens.expect(")")
    return number
