"""Turn every reshard into the cheapest sequence of collectives and local steps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.errors import CompilerError
from passes.ir.collective import all_gather, all_reduce, all_to_all, reduce_scatter, take_part, take_term
from passes.ir.graph import (
    Stage,
    copy_facts,
    is_recompute,
    is_reshard,
    layout_of,
    note_of,
    operands,
    set_layouts,
    set_needs,
    set_note,
    set_recompute,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.layout import Layout, Partial, Placement, R, Shard, is_even, is_storable, local_shape
from passes.ir.mesh import Mesh

Kind = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class LowerReshards(Pass):
    """Replace each reshard by steps, each a collective over one or more axes or a local one.

    The sequence is the one that receives the fewest bytes, then has the fewest collectives: found over all
    layouts between source and target (every axis at its source, its target or `R`). Several axes that
    gather, or reduce, or scatter next to each other move in one collective.

    A step stands in front of its first user if it grows the value, behind its producer if it shrinks it.

    Before:

        mesh dp=2,tp=2
        stage EXPLICIT
        %w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
        %x: f32[4, 8, 6] {dp:S(0), tp:R} = input("x")
        %sum_1: f32[8, 6] {dp:P(sum), tp:R} = sum.dim_IntList(%x, [0])
        %reshard: f32[8, 6] {dp:R, tp:R} = reshard(%w)
        %reshard_1: f32[8, 6] {dp:S(0), tp:S(1)} = reshard(%sum_1)
        return output("0") %reshard, output("1") %reshard_1

    After:

        mesh dp=2,tp=2
        stage COLLECTIVE
        %w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
        %x: f32[4, 8, 6] {dp:S(0), tp:R} = input("x")
        %sum_1: f32[8, 6] {dp:P(sum), tp:R} = sum.dim_IntList(%x, [0])
        %take_part: f32[8, 6] {dp:P(sum), tp:S(1)} = take_part(%sum_1, ["tp"])
        %reduce_scatter: f32[8, 6] {dp:S(0), tp:S(1)} = reduce_scatter(%take_part, ["dp"])
        %all_gather: f32[8, 6] {dp:R, tp:R} = all_gather(%w, ["dp", "tp"])
        return output("0") %all_gather, output("1") %reduce_scatter
    """

    name: ClassVar[str] = "lower_reshards"
    takes: ClassVar[Stage] = Stage.EXPLICIT
    gives: ClassVar[Stage] = Stage.COLLECTIVE

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        nodes = [node for node in gm.graph.nodes if is_reshard(node)]
        for node in nodes:
            _lower(node, ctx.mesh, order)
        return bool(nodes)


def _lower(node: Node, mesh: Mesh, order: dict[Node, int]) -> None:
    value = operands(node)[0]
    shape = tuple(tensor_of(node).shape)
    steps = plan_steps(layout_of(value), layout_of(node), shape, mesh)
    grows = math.prod(local_shape(layout_of(node), shape, mesh)) > math.prod(local_shape(layout_of(value), shape, mesh))
    first_user = min(node.users, key=lambda user: order.get(user, -1), default=None)
    current = value
    for step in steps:
        before = first_user if grows and first_user is not None else node
        with node.graph.inserting_before(before):
            new = node.graph.call_function(step.kind, (current, [mesh.names[a] for a in step.axes]))
        order[new] = order.get(before, 0)
        copy_facts(node, new)
        set_value(new, value_of(node))
        set_layouts(new, step.layout)
        set_needs(new, (layout_of(current),))
        set_note(new, note_of(node))
        set_recompute(new, is_recompute(node))
        current = new
    node.replace_all_uses_with(current)
    node.graph.erase_node(node)


@dataclass(frozen=True)
class Step:
    """One collective or local step, the axes that it moves, and the layout that it gives."""

    kind: Kind
    axes: tuple[int, ...]
    layout: Layout
    received: int  # elements that each rank receives


def plan_steps(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target` for a tensor of global `shape`.

    Cheapest: fewest elements received per rank, then fewest collectives, then first found (Dijkstra).
    Raises CompilerError where no sequence exists.
    """
    frontier: list[tuple[int, int, int, Layout, tuple[Step, ...]]] = [(0, 0, 0, source, ())]
    done: set[Layout] = set()
    pushed = 0
    while frontier:
        received, collectives, _, layout, steps = heapq.heappop(frontier)
        if layout == target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in _next_steps(layout, source, target, shape, mesh):
            pushed += 1
            sends = int(step.kind not in (take_part, take_term))
            entry = (received + step.received, collectives + sends, pushed, step.layout, (*steps, step))
            heapq.heappush(frontier, entry)
    raise CompilerError(f"no way from {source.format(mesh)} to {target.format(mesh)} for a tensor of shape {shape}")


def _next_steps(layout: Layout, source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Step]:
    moves: dict[Kind, list[tuple[int, Placement]]] = {}
    for axis in range(mesh.ndim):
        for to in dict.fromkeys((target.on(axis), R)):
            kind = _kind(layout.on(axis), to)
            if kind is not None:
                moves.setdefault(kind, []).append((axis, to))
    for kind, single in moves.items():
        sizes = (1,) if kind is all_to_all else range(1, len(single) + 1)
        for count in sizes:
            for group in combinations(single, count):
                step = _step(kind, group, layout, shape, mesh)
                if step is not None:
                    yield step


def _kind(have: Placement, to: Placement) -> Kind | None:
    if have == to:
        return None
    match have, to:
        case Shard(), Shard():
            return all_to_all
        case Shard(), _:
            return all_gather if to == R else None
        case Partial(), Shard():
            return reduce_scatter if have.op == "sum" else None
        case Partial(), _:
            return all_reduce if to == R else None
        case _, Shard():
            return take_part
        case _, Partial():
            return take_term if to == Partial("sum") else None
    return None


def _step(
    kind: Kind, group: tuple[tuple[int, Placement], ...], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> Step | None:
    axes = tuple(axis for axis, _ in group)
    if len(set(axes)) < len(axes) or (kind is all_reduce and len({layout.on(axis) for axis in axes}) > 1):
        return None
    after = layout
    for axis, placement in group:
        after = after.with_on(axis, placement)
    if not is_storable(after, shape, mesh):
        return None
    if kind is all_to_all and not _is_exchange(layout, after, axes[0], shape, mesh):
        return None
    ranks = math.prod(mesh.sizes[axis] for axis in axes)
    before, behind = (math.prod(local_shape(at, shape, mesh)) for at in (layout, after))
    received = {
        all_gather: (ranks - 1) * before,
        reduce_scatter: (ranks - 1) * behind,
        all_reduce: 2 * (ranks - 1) * -(-before // ranks),
        all_to_all: (ranks - 1) * -(-before // ranks),
    }
    return Step(kind, axes, after, received.get(kind, 0))


def _is_exchange(layout: Layout, after: Layout, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the axis's old and new digit lie side by side, so that one can be sent for the other."""
    twice = Mesh((*mesh.names, f"{mesh.names[axis]}_new"), (*mesh.sizes, mesh.sizes[axis]))
    return is_even(Layout((*layout.placements, after.on(axis))), shape, twice)
