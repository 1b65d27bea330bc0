"""Add partial sums before they are reduced: one reduction for several terms of a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import fake_mode_of
from passes.base import Pass, PassContext
from passes.ir.graph import (
    Stage,
    add_call,
    copy_facts,
    is_reshard,
    is_tensor,
    layout_of,
    needs_of,
    note_of,
    operands,
    reshard,
    set_layouts,
    set_needs,
    set_note,
    set_value,
    tensor_of,
    value_of,
)

_add = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class MergeReductions(Pass):
    """Two terms of a sum that are partial alike, and reduced alike, are added first and reduced once.

    1. `reshard(a) + reshard(b)` is `reshard(a + b)`.
    2. `(x + reshard(a)) + reshard(b)` is `x + reshard(a + b)`, where nothing else uses the inner sum.

    The gradient of a value that several column-parallel linears use is such a sum.

    Before:

        mesh tp=2
        stage EXPLICIT
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %w: f32[8, 8] {tp:S(0)} = parameter("w")
        %mm: f32[4, 8] {tp:R} = reshard(%x)
        %relu: f32[4, 8] {tp:R} = relu(%mm)
        %reshard: f32[4, 8] {tp:S(1)} = reshard(%relu)
        %a: f32[4, 8] {tp:P(sum)} = mm(%reshard, %w)
        %b: f32[4, 8] {tp:P(sum)} = neg(%a)
        %reshard_1: f32[4, 8] {tp:S(0)} = reshard(%a)
        %add: f32[4, 8] {tp:S(0)} = add.Tensor(%x, %reshard_1)
        %reshard_2: f32[4, 8] {tp:S(0)} = reshard(%b)
        %add_1: f32[4, 8] {tp:S(0)} = add.Tensor(%add, %reshard_2)
        return output("output") %add_1

    After:

        mesh tp=2
        stage EXPLICIT
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %w: f32[8, 8] {tp:S(0)} = parameter("w")
        %mm: f32[4, 8] {tp:R} = reshard(%x)
        %relu: f32[4, 8] {tp:R} = relu(%mm)
        %reshard: f32[4, 8] {tp:S(1)} = reshard(%relu)
        %a: f32[4, 8] {tp:P(sum)} = mm(%reshard, %w)
        %b: f32[4, 8] {tp:P(sum)} = neg(%a)
        %add_2: f32[4, 8] {tp:P(sum)} = add.Tensor(%a, %b)
        %reshard_3: f32[4, 8] {tp:S(0)} = reshard(%add_2)
        %add_3: f32[4, 8] {tp:S(0)} = add.Tensor(%x, %reshard_3)
        return output("output") %add_3
    """

    name: ClassVar[str] = "merge_reductions"
    takes: ClassVar[Stage] = Stage.EXPLICIT
    gives: ClassVar[Stage] = Stage.EXPLICIT

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        for node in list(gm.graph.nodes):
            if node.target is _add and not node.kwargs and len(operands(node)) == 2:
                changed |= _merge(node)
        return changed


def _merge(node: Node) -> bool:
    left, right = operands(node)
    for outer, inner in ((right, left), (left, right)):
        if not _is_reduction(outer):
            continue
        if _are_alike(inner, outer):
            _replace(node, [inner, outer], None)
            return True
        for rest, term in _inner_terms(inner):
            if _are_alike(term, outer):
                _replace(node, [term, outer], rest)
                return True
    return False


def _inner_terms(node: Node) -> list[tuple[Node, Node]]:
    """Ways to see a sum that only one call uses as rest and term."""
    if node.target is not _add or node.kwargs or len(node.users) > 1 or len(operands(node)) != 2:
        return []
    left, right = operands(node)
    return [(left, right), (right, left)]


def _is_reduction(node: Node) -> bool:
    return is_reshard(node) and len(node.users) == 1 and needs_of(node)[0].has_partial


def _are_alike(first: Node, second: Node) -> bool:
    if not (is_tensor(first) and _is_reduction(first) and first is not second):
        return False
    same_moves = needs_of(first) == needs_of(second) and layout_of(first) == layout_of(second)
    a, b = tensor_of(first), tensor_of(second)
    return same_moves and a.shape == b.shape and a.dtype == b.dtype


def _replace(node: Node, terms: list[Node], rest: Node | None) -> None:
    """`node`, a sum of the reduced `terms` and `rest`, with the terms added before they are reduced."""
    graph, (first, second) = node.graph, terms
    partial, reduced = needs_of(first)[0], layout_of(first)
    sources = tuple(operands(term)[0] for term in terms)
    with graph.inserting_before(node), fake_mode_of([value_of(node)]):
        total = add_call(graph, _add, sources, {})
        set_value(total, tensor_of(sources[0]) + tensor_of(sources[1]))
        new = add_call(graph, reshard, (total,), {})
        set_value(new, value_of(total))
        copy_facts(first, total)
        copy_facts(second, new)
        set_layouts(total, partial)
        set_needs(total, (partial, partial))
        set_layouts(new, reduced)
        set_needs(new, (partial,))
        set_note(new, note_of(second))
        result = new
        if rest is not None:
            result = add_call(graph, _add, (rest, new), {})
            copy_facts(node, result)
            set_value(result, value_of(node))
            set_layouts(result, layout_of(node))
            set_needs(result, (layout_of(rest), reduced))  # `rest` may broadcast
    node.replace_all_uses_with(result)
    inner = [value for value in operands(node) if value not in terms]
    for dead in (node, *inner, *terms):
        if not dead.users and dead is not rest and dead.op != "placeholder":
            graph.erase_node(dead)
