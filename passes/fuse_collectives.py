"""Send fewer and smaller messages for the same values: add before reducing, and cast on the cheaper side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import fake_mode_of
from passes.base import Pass, PassContext
from passes.cost.collective_time import collective_seconds
from passes.ir.graph import (
    Stage,
    add_call,
    copy_facts,
    is_recompute,
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
    set_recompute,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.layout import Layout, Partial, R, Shard, is_even, local_shape
from passes.ir.text import DTYPE_NAMES

_add = torch.ops.aten.add.Tensor
_convert = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class FuseCollectives(Pass):
    """Let reshards move fewer bytes: add values before they are reduced, and move them in the narrower dtype.

    1. `reshard(a) + reshard(b)`, with the same source and target layouts, becomes `reshard(a + b)`.
    2. `(x + reshard(a)) + reshard(b)` becomes `x + reshard(a + b)` if nothing else uses the inner sum.
    3. `cast(reshard(a))` to a narrower dtype becomes `reshard(cast(a))` if nothing is reduced: the bits are the same.
    4. If `a` is reduced, it becomes `reshard(cast(reshard(a)))` where that is faster: an all-reduce becomes a
       reduce-scatter, a cast of the parts, and a smaller all-gather.
    5. `reshard(cast(a))` from a narrower dtype becomes `cast(reshard(a))`. A sum is then reduced in the dtype in which
       the model computes it, such as that of a row-parallel linear; on one device it is rounded to that dtype too. A
       value that is widened for its reduction, as `reduce_dtype` demands, stays wide.

    The gradient of a value that several column-parallel linears use is a sum as in 1, and widened as in 5 by a norm
    that computes in float32. `cancel_reshards` merges equal gathers and turns reductions that are cut into parts into
    reduce-scatters; `lower_reshards` joins several axes in one message.

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
        %reshard_4: f32[4, 8] {tp:R} = reshard(%add_1)
        %convert_element_type: bf16[4, 8] {tp:R} = prims.convert_element_type(%reshard_4, bf16)
        return output("output") %convert_element_type

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
        %reshard_5: f32[4, 8] {tp:S(0)} = reshard(%add_2)
        %add_3: f32[4, 8] {tp:S(0)} = add.Tensor(%x, %reshard_5)
        %convert_element_type: bf16[4, 8] {tp:S(0)} = prims.convert_element_type(%add_3, bf16)
        %reshard_6: bf16[4, 8] {tp:R} = reshard(%convert_element_type)
        return output("output") %reshard_6
    """

    name: ClassVar[str] = "fuse_collectives"
    takes: ClassVar[Stage] = Stage.EXPLICIT
    gives: ClassVar[Stage] = Stage.EXPLICIT

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        for node in list(gm.graph.nodes):
            if node.target is _add and not node.kwargs and len(operands(node)) == 2:
                changed |= _merge(node)
        for node in [node for node in gm.graph.nodes if is_reshard(node)]:
            changed |= self._narrowed(node, ctx) or self._widened_after(node, ctx)
        return changed

    def _narrowed(self, node: Node, ctx: PassContext) -> bool:
        """Turn `cast(reshard(a))` into `reshard(cast(a))`, or `reshard(cast(reshard(a)))` if `a` is reduced."""
        source, before = operands(node)[0], needs_of(node)[0]
        if not _sends(node) or not _is_read_narrow(node):
            return False
        parted = self._parted(node, ctx) if before.has_partial else before
        if parted is None or not _can_cast_in(parted, node):
            return False
        first = min(node.users)
        for cast in list(node.users):
            if cast is not first:
                cast.replace_all_uses_with(first)
                node.graph.erase_node(cast)
        first.replace_input_with(node, _moved(node, source, parted) if before.has_partial else source)
        _lay_out(first, parted)
        moved = _moved(node, first, layout_of(node))
        first.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
        first.append(moved)
        node.graph.erase_node(node)
        text = "reduced in parts, and gathered as" if before.has_partial else "cast before it to"
        ctx.remark(self, moved, f"{text} {DTYPE_NAMES[tensor_of(moved).dtype]}", routine=True)
        return True

    def _parted(self, node: Node, ctx: PassContext) -> Layout | None:
        """Return the layout in which to cast an all-reduce's result, if a reduce-scatter and an all-gather are
        faster."""
        mesh, shape, before, whole = ctx.mesh, tensor_of(node).shape, needs_of(node)[0], layout_of(node)
        axes = [axis for axis in range(mesh.ndim) if before.on(axis) != whole.on(axis)]
        if len(axes) != 1 or whole.on(axes[0]) != R or before.on(axes[0]) != Partial("sum") or mesh.hardware is None:
            return None
        dims = [dim for dim in range(len(shape)) if not whole.axes_on(dim)]
        layouts = (whole.with_on(axes[0], Shard(dim)) for dim in dims)
        parted = next((layout for layout in layouts if is_even(layout, shape, mesh)), None)
        if parted is None:
            return None
        group, count = mesh.group_shape((mesh.names[axes[0]],)), math.prod(local_shape(whole, shape, mesh))
        wide, narrow = (count * tensor_of(value).dtype.itemsize for value in (node, min(node.users)))
        together = collective_seconds("all_reduce", wide, group, mesh.hardware)
        apart = sum(
            collective_seconds(kind, nbytes, group, mesh.hardware)
            for kind, nbytes in (("reduce_scatter", wide), ("all_gather", narrow))
        )
        return parted if apart < together else None

    def _widened_after(self, node: Node, ctx: PassContext) -> bool:
        """Turn `reshard(cast(a))` into `cast(reshard(a))`."""
        cast = operands(node)[0]
        if cast.target is not _convert or len(cast.users) > 1 or not _sends(node):
            return False
        if not _can_cast_in(layout_of(node), node):
            return False
        source = operands(cast)[0]
        is_sum = needs_of(node)[0].has_partial
        if not _is_narrower(tensor_of(source), tensor_of(cast)) or (is_sum and note_of(cast)):
            return False
        moved = _moved(node, source, layout_of(node))
        cast.prepend(moved)
        cast.replace_input_with(source, moved)
        _lay_out(cast, layout_of(node))
        set_recompute(cast, is_recompute(node))
        node.replace_all_uses_with(cast)
        node.graph.erase_node(node)
        dtype = DTYPE_NAMES[tensor_of(moved).dtype]
        reduced = f"reduced in {dtype}, in which it is computed, and cast after"
        text = reduced if is_sum else f"moved in {dtype}, cast after"
        ctx.remark(self, moved, text, routine=not is_sum)
        return True


def _is_read_narrow(node: Node) -> bool:
    """Return whether all readers of a value cast it to one narrower dtype."""
    casts = [user for user in node.users if user.target is _convert and _is_narrower(tensor_of(user), tensor_of(node))]
    return len(casts) == len(node.users) and len({tensor_of(cast).dtype for cast in casts}) == 1


def _can_cast_in(layout: Layout, node: Node) -> bool:
    """Return whether the rule of a cast shards `node`'s value so: it has no factor for a dim of one element."""
    return not any(layout.axes_on(dim) for dim, size in enumerate(tensor_of(node).shape) if size == 1)


def _sends(node: Node) -> bool:
    """Return whether a reshard moves more than a rank's own parts."""
    moves = zip(needs_of(node)[0].placements, layout_of(node).placements, strict=True)
    return any(have != want and (isinstance(have, Shard) or needs_of(node)[0].has_partial) for have, want in moves)


def _is_narrower(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a cast from `one` to `other` only rounds: floating point of fewer bytes, so that the cast back is
    exact."""
    return one.is_floating_point() and other.is_floating_point() and one.dtype.itemsize < other.dtype.itemsize


def _moved(node: Node, source: Node, layout: Layout) -> Node:
    """Add a reshard like `node`, of `source` to `layout`; the caller sets its users."""
    graph = node.graph
    with graph.inserting_before(node):
        new = add_call(graph, reshard, (source,), {})
    copy_facts(node, new)
    set_value(new, value_of(source))
    set_layouts(new, layout)
    set_needs(new, (layout_of(source),))
    set_note(new, note_of(node))
    set_recompute(new, is_recompute(node))
    return new


def _lay_out(cast: Node, layout: Layout) -> None:
    set_layouts(cast, layout)
    set_needs(cast, (layout,))


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
    """Yield the ways to split a sum that only one call uses into a rest and a term."""
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
    """Replace `node`, the sum of `rest` and the reduced `terms`, by one that adds the terms before they are reduced."""
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
