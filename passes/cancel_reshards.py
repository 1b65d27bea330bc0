"""Remove, merge and move reshards without changing the layouts of their users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload
from passes.base import Pass, PassContext
from passes.ir.graph import (
    Stage,
    add_call,
    copy_facts,
    inserting_after,
    is_recompute,
    is_reshard,
    layout_of,
    layouts_of,
    note_of,
    operands,
    reshard,
    results_of,
    set_layouts,
    set_needs,
    set_note,
    set_operands,
    set_recompute,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_even
from passes.ir.mesh import Mesh
from passes.rules.rule import Row, Space, row_giving, space_of

aten = torch.ops.aten

_MOVES = (aten.view.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)


@dataclass(frozen=True)
class CancelReshards(Pass):
    """Remove, merge and move reshards until nothing changes.

    1. A reshard to the layout that its operand has is removed.
    2. A reshard of a reshard that nobody else uses becomes one reshard.
    3. A reshard of a view or permute moves before it, so that equal reshards can be merged.
    4. Equal reshards of one value are merged.
    5. A replicated value that every user takes in parts (`R -> S`) is computed in parts, if its operands
       are replicated as well; so is the result of a factory.

    Before:

        mesh tp=2
        stage EXPLICIT
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %permute: f32[8, 4] {tp:S(1)} = permute(%x, [1, 0])
        %reshard: f32[8, 4] {tp:R} = reshard(%permute)
        %relu: f32[8, 4] {tp:R} = relu(%reshard)
        %reshard_1: f32[4, 8] {tp:R} = reshard(%x)
        %exp: f32[4, 8] {tp:R} = exp(%reshard_1)
        return output("0") %relu, output("1") %exp

    After:

        mesh tp=2
        stage EXPLICIT
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %reshard_2: f32[4, 8] {tp:R} = reshard(%x)
        %permute_1: f32[8, 4] {tp:R} = permute(%reshard_2, [1, 0])
        %relu: f32[8, 4] {tp:R} = relu(%permute_1)
        %exp: f32[4, 8] {tp:R} = exp(%reshard_2)
        return output("0") %relu, output("1") %exp
    """

    name: ClassVar[str] = "cancel_reshards"
    takes: ClassVar[Stage] = Stage.EXPLICIT
    gives: ClassVar[Stage] = Stage.EXPLICIT

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        while _simplify(gm, ctx.mesh) | _merge(gm):
            changed = True
        return changed


def _simplify(gm: GraphModule, mesh: Mesh) -> bool:
    changed = False
    for node in reversed(list(gm.graph.nodes)):
        if not is_reshard(node):
            continue
        if not node.users:
            gm.graph.erase_node(node)
            changed = True
            continue
        changed |= _is_identity(node) or _joined(node) or _above_move(node, mesh) or _in_parts(node, mesh)
    return changed


def _source(node: Node) -> Node:
    return operands(node)[0]


def _is_identity(node: Node) -> bool:
    if layout_of(node) != layout_of(_source(node)):
        return False
    node.replace_all_uses_with(_source(node))
    node.graph.erase_node(node)
    return True


def _joined(node: Node) -> bool:
    source = _source(node)
    if not is_reshard(source) or len(source.users) > 1:
        return False
    node.replace_input_with(source, _source(source))
    set_needs(node, (layout_of(_source(source)),))
    set_recompute(node, is_recompute(source) or is_recompute(node))
    return True  # the source has no users left, and is removed when its turn comes


def _above_move(node: Node, mesh: Mesh) -> bool:
    """Turn reshard(move(x)) into move(reshard(x))."""
    move = _source(node)
    if move.target not in _MOVES or _is_part_of_replicated(node):
        return False
    space = space_of(move)
    if space is None:
        return False
    row = _layout_through(space, layout_of(node), mesh)
    source = operands(move)[0]
    if row is None or not is_even(row, tensor_of(source).shape, mesh):
        return False
    graph = node.graph
    with inserting_after(source):
        above = graph.call_function(reshard, (source,))
    with inserting_after(above):
        moved = add_call(graph, move.target, (above, *move.args[1:]), dict(move.kwargs))
    _dress(above, node, source, row, layout_of(source))
    _dress(moved, move, move, layout_of(node), row)
    node.replace_all_uses_with(moved)
    graph.erase_node(node)
    if not move.users:
        graph.erase_node(move)
    return True


def _dress(new: Node, facts: Node, value: Node, layout: Layout, need: Layout) -> None:
    copy_facts(facts, new)
    set_value(new, value_of(value))
    set_layouts(new, layout)
    set_needs(new, (need,))
    set_note(new, note_of(facts))
    set_recompute(new, is_recompute(facts))


def _layout_through(space: Space, result: Layout, mesh: Mesh) -> Layout | None:
    """Return the operand's layout that gives `result` through a move; None where the move has no such row."""
    placements: list[Placement] = []
    for axis, placement in enumerate(result.placements):
        if isinstance(placement, Shard):
            row = row_giving(space, 0, placement, mesh.sizes[axis])
            if row is None:
                return None
            placement = row.operands[0]
        placements.append(placement)
    return Layout(tuple(placements))


def _is_part_of_replicated(node: Node) -> bool:
    """Return whether the reshard only takes parts (or terms) of what every rank has."""
    pairs = zip(layout_of(_source(node)).placements, layout_of(node).placements, strict=True)
    return all(have in (need, R) for have, need in pairs)


def _in_parts(node: Node, mesh: Mesh) -> bool:
    """Turn take_part(op(x, ...)) into op(take_part(x), ...), down to the factories."""
    source, layout = _source(node), layout_of(node)
    if not isinstance(source.target, OpOverload) or not _is_part_of_replicated(node) or len(results_of(source)) != 1:
        return False
    is_factory = not operands(source)
    if not is_factory and any(not is_reshard(u) or layout_of(u) != layout for u in source.users):
        return False
    space = space_of(source)
    if space is None:
        return False
    moved = [a for a, (p, q) in enumerate(zip(layout_of(source).placements, layout.placements, strict=True)) if p != q]
    needs = _needs_in_parts(source, space, layout, moved, mesh)
    if needs is None:
        return False
    _recompute_in_parts(node, source, needs)
    return True


def _needs_in_parts(
    source: Node, space: Space, layout: Layout, moved: list[int], mesh: Mesh
) -> tuple[Layout, ...] | None:
    needs = [layout_of(value) for value in operands(source)]
    for axis in moved:
        placement = layout.on(axis)
        if isinstance(placement, Partial) and not (not needs and source.args[1:2] == (0,)):
            return None
        row = row_giving(space, 0, placement, mesh.sizes[axis]) if isinstance(placement, Shard) else Row("", (), ())
        if row is None or any(isinstance(p, Partial) for p in row.operands):
            return None
        needs = [need.with_on(axis, p) for need, p in zip(needs, row.operands, strict=True)]
    shapes = [tensor_of(value).shape for value in operands(source)]
    return tuple(needs) if all(is_even(n, s, mesh) for n, s in zip(needs, shapes, strict=True)) else None


def _recompute_in_parts(node: Node, source: Node, needs: tuple[Layout, ...]) -> None:
    graph, parts = node.graph, list(operands(source))
    with graph.inserting_before(source):
        for number, (value, need) in enumerate(zip(operands(source), needs, strict=True)):
            if need != layout_of(value):
                parts[number] = graph.call_function(reshard, (value,))
                _dress(parts[number], node, value, need, layout_of(value))
        new = graph.node_copy(source)
    set_operands(new, parts)  # by position: a call may take one value twice, in two layouts
    set_layouts(new, layout_of(node))
    set_needs(new, needs)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    if not source.users:
        graph.erase_node(source)


def _merge(gm: GraphModule) -> bool:
    """Merge equal reshards, and equal moves of them, into the first."""
    seen: dict[object, Node] = {}
    merged = False
    for node in list(gm.graph.nodes):
        if not is_reshard(node) and node.target not in _MOVES:
            continue
        key = (node.target, str(node.args), str(node.kwargs), layouts_of(node))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            merged = True
    return merged
