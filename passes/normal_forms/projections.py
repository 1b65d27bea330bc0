"""Split a product whose columns slices cut into unequal parts, such as a fused query, key and value with fewer key heads.

An axis shards equal parts of a dim, each by itself, as one digit of it. No digit shards unequal parts, so each gets a
product of its own, with a slice of the weight. Parts are followed through the ops that act on each of them alone, in the
forward and in the backward; before any other op they are joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from passes._torch import FakeTensorMode, OpOverload
from passes.ir.fake_calls import is_viewable
from passes.ir.graph import InputRole, is_random, operands, placeholders, tensor_of
from passes.normal_forms.rewriting import At, as_int
from passes.propagation.partial_sums import is_zero
from passes.recipes.weights import weights_of
from passes.rules.rule import space_of

aten = torch.ops.aten
prims = torch.ops.prims

_OPERANDS: Mapping[Any, int] = {aten.slice.Tensor: 1, aten.slice_scatter.default: 2}  # before dim, start, end, step

_REPEATED = (  # ops that keep dims as they are, whatever their length
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.sum.dim_IntList,
    aten.clone.default,
    prims.convert_element_type.default,
)


@dataclass(frozen=True)
class _Parts:
    """The parts that a value consists of, along a dim."""

    dim: int
    nodes: tuple[Node, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(tensor_of(node).shape[self.dim] for node in self.nodes)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise((0, *accumulate(self.lengths))))


@dataclass(frozen=True)
class Split:
    """A product that was split: the product of the first part, and the columns of each part."""

    first: Node
    columns: tuple[int, ...]


def split_projections(graph: Graph, fake_mode: FakeTensorMode, parts: int) -> tuple[Split, ...]:
    """Split the products with parameters that need it, where an axis of `parts` ranks can shard a part of the columns.
    """
    weights = weights_of(graph)
    found = ((node, _cut(node, weights)) for node in graph.nodes)
    cuts = {node: cut for node, cut in found if cut is not None and any(part % parts == 0 for part in cut)}
    if not cuts:
        return ()
    splitting = _Splitting(graph, fake_mode, weights, cuts)
    splitting.run()
    return tuple(Split(splitting.parts[node].nodes[0], cut) for node, cut in cuts.items())


# --- which products are split


def _cut(node: Node, weights: dict[Node, Node]) -> tuple[int, ...] | None:
    """Return the lengths of the parts that slices cut the columns of a product into; None if they need no products."""
    if node.target is not aten.mm.default:
        return None
    x, weight = operands(node)[0], operands(node)[-1]
    if x in weights or weight not in weights:
        return None
    columns = tensor_of(node).shape[1]
    slices = _slices(node, 1, columns)
    if not slices:
        return None
    parts = list(pairwise(sorted({0, columns, *(end for bounds in slices for end in bounds)})))
    lengths = tuple(end - start for start, end in parts)
    return lengths if slices <= set(parts) and len(set(lengths)) > 1 else None


def _slices(value: Node, dim: int, columns: int) -> set[tuple[int, int]] | None:
    """Return the bounds of all slices of `dim`, which is the columns; None if any use needs them whole."""
    found: set[tuple[int, int]] = set()
    pending, seen = [(value, dim)], {value}
    while pending:
        value, dim = pending.pop()
        for user in value.users:
            if user.target is aten.slice.Tensor and _dim(user, 1) == dim and _step(user) == 1:
                start, end = _window(user, columns)
                inner = _slices(user, dim, end - start)
                found |= {(start + first, start + last) for first, last in inner} if inner else {(start, end)}
            elif (kept := _kept_dim(user, value, dim)) is None:
                return None
            elif user not in seen:
                seen.add(user)
                pending.append((user, kept))
    return found


def _kept_dim(node: Node, value: Node, dim: int) -> int | None:
    """Return the dim of the result of a view, a move or a pointwise op that is `dim` of its operand; None if none is."""
    if _is_pointwise(node):
        shape, ndim = tensor_of(node).shape, tensor_of(value).dim()
        at = dim - ndim + len(shape)
        return at if shape[at] == tensor_of(value).shape[dim] else None
    if node.target is not aten.view.default and node.target not in _REPEATED:
        return None
    space = space_of(node)
    factors = () if space is None else space.operands[0][dim]
    return space.results[0].index(factors) if space is not None and factors in space.results[0] and factors else None


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags and not is_random(node)


def _dim(node: Node, position: int) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return as_int(dim) % tensor_of(node).dim()


def _step(node: Node) -> int:
    position = _OPERANDS[node.target] + 3
    return as_int(node.args[position]) if len(node.args) > position else as_int(node.kwargs.get("step", 1))


def _window(node: Node, size: int) -> tuple[int, int]:
    """Return the bounds of a slice of a dim with `size` elements."""
    first = _OPERANDS[node.target] + 1
    given = [*node.args[first : first + 2], None, None][:2]
    start, end = (node.kwargs.get(name, value) for name, value in zip(("start", "end"), given, strict=True))
    found = slice(start, end).indices(size)
    return found[0], max(found[:2])


def _pieces(cat: Node) -> Iterator[Node]:
    """Yield the operands of a `cat`, and those of a `cat` among them."""
    for value in operands(cat):
        if value.target is cat.target and _dim(value, 1) == _dim(cat, 1):
            yield from _pieces(value)
        else:
            yield value


def _backward(graph: Graph) -> set[Node]:
    """Return the values that depend on the gradient of an output."""
    found = set(placeholders(graph, InputRole.TANGENT))
    for node in graph.nodes:
        if any(value in found for value in node.all_input_nodes):
            found.add(node)
    return found


# --- the calls on parts


class _Splitting:
    """Makes the calls of a graph on parts, in order."""

    def __init__(
        self, graph: Graph, fake_mode: FakeTensorMode, weights: dict[Node, Node], cuts: dict[Node, tuple[int, ...]]
    ) -> None:
        self.graph, self.fake_mode, self.weights, self.cuts = graph, fake_mode, weights, cuts
        self.backward = _backward(graph)
        self.parts: dict[Node, _Parts] = {}
        self.joined: dict[Node, Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._visit(node)
        output = self.graph.output_node()
        for value in output.all_input_nodes:
            if value in self.parts:
                output.replace_input_with(value, self._whole(value, output))

    def _visit(self, node: Node) -> None:
        if node in self.cuts:
            self.parts[node] = self._product(node)
        elif node in self.backward and (found := self._joined_parts(node) or self._written_part(node)) is not None:
            self.parts[node] = found
        elif any(value in self.parts for value in node.all_input_nodes):
            made = _ON_PARTS.get(node.target, _pointwise if _is_pointwise(node) else _nothing)(self, node)
            if isinstance(made, _Parts):
                self.parts[node] = made
            elif made is not None:
                node.replace_all_uses_with(made)
            else:
                for value in node.all_input_nodes:
                    if value in self.parts:
                        node.replace_input_with(value, self._whole(value, node))

    def _product(self, node: Node) -> _Parts:
        x, weight = operands(node)[0], operands(node)[-1]
        x = self._whole(x, node) if x in self.parts else x
        slices = self.sliced(weight, 1, self.cuts[node], node)
        return _Parts(1, tuple(self.call(node, aten.mm.default, x, part) for part in slices))

    def _joined_parts(self, node: Node) -> _Parts | None:
        """Return the operands of a call that joins gradients of such parts."""
        if node.target is not aten.cat.default:
            return None
        for pieces in (tuple(operands(node)), tuple(_pieces(node))):
            parts = _Parts(_dim(node, 1), pieces)
            if parts.lengths in self.cuts.values() and not any(piece in self.parts for piece in pieces):
                return parts
        return None

    def _written_part(self, node: Node) -> _Parts | None:
        """Return the parts of zeros into which the gradient of one or several parts is written."""
        if node.target is not aten.slice_scatter.default or not is_zero(operands(node)[0]) or _step(node) != 1:
            return None
        dim, shape = _dim(node, 2), list(tensor_of(node).shape)
        start, end = _window(node, shape[dim])
        for lengths in self.cuts.values():
            bounds = tuple(pairwise((0, *accumulate(lengths))))
            inside = [i for i, (first, last) in enumerate(bounds) if start <= first and last <= end]
            if bounds[-1][1] == shape[dim] and sum(lengths[i] for i in inside) == end - start > 0:
                break
        else:
            return None
        written = iter(self.sliced(operands(node)[1], dim, [lengths[i] for i in inside], node))
        zeros = {length: self._zeros(node, [*shape[:dim], length, *shape[dim + 1 :]]) for length in lengths}
        return _Parts(dim, tuple(next(written) if i in inside else zeros[size] for i, size in enumerate(lengths)))

    def _zeros(self, node: Node, shape: list[int]) -> Node:
        like = tensor_of(node)
        return self.call(node, aten.full.default, shape, 0, dtype=like.dtype, device=like.device, pin_memory=False)

    def _whole(self, value: Node, user: Node) -> Node:
        """Return the value of all parts together."""
        if value not in self.joined:
            parts = self.parts[value]
            self.joined[value] = self.call(user, aten.cat.default, list(parts.nodes), parts.dim)
        return self.joined[value]

    def call(self, place: Node, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return At(self.graph, place, self.fake_mode).call(op, *args, **kwargs)

    def sliced(self, value: Node, dim: int, lengths: Sequence[int], user: Node) -> tuple[Node, ...]:
        """Return the parts of `value` along `dim`; those of a form of a parameter are forms of slices of it."""
        if value in self.parts and self.parts[value].dim == dim and self.parts[value].lengths == tuple(lengths):
            return self.parts[value].nodes
        if value in self.weights and value.target in (aten.permute.default, prims.convert_element_type.default):
            source = operands(value)[0]
            moved = _order(value)[dim] if value.target is aten.permute.default else dim
            pieces = self.sliced(source, moved, lengths, user)
            return tuple(_with(self, value, {source: piece}, user) for piece in pieces)
        if value in self.parts:
            value = self._whole(value, user)
        bounds = pairwise((0, *accumulate(lengths)))
        return tuple(self.call(user, aten.slice.Tensor, value, dim, start, end) for start, end in bounds)


_Made = _Parts | Node | None


def _nothing(split: _Splitting, node: Node) -> _Made:
    return None


def _pointwise(split: _Splitting, node: Node) -> _Made:
    """Apply a pointwise op to each part, with the same part of the other operands."""
    shape = tensor_of(node).shape
    first = next(split.parts[value] for value in operands(node) if value in split.parts)
    at = first.dim - len(first.nodes[0].meta["val"].shape)  # from the end, as shapes broadcast
    if any(value in split.parts and split.parts[value].lengths != first.lengths for value in operands(node)):
        return None
    pieces: dict[Node, tuple[Node, ...]] = {}
    for value in operands(node):
        sizes = tensor_of(value).shape
        if len(sizes) >= -at and sizes[at] == shape[at]:
            if value in split.parts and split.parts[value].dim != len(sizes) + at:
                return None
            pieces[value] = split.sliced(value, len(sizes) + at, first.lengths, node)
    if node.target is aten.add.Tensor and len(pieces) == 2 and not node.kwargs:
        return _Parts(len(shape) + at, tuple(_sum_of(split, node, *pair) for pair in zip(*pieces.values(), strict=True)))
    made = [_with(split, node, {value: parts[i] for value, parts in pieces.items()}) for i in range(len(first.nodes))]
    return _Parts(len(shape) + at, tuple(made))


def _sum_of(split: _Splitting, node: Node, one: Node, other: Node) -> Node:
    """Add two parts; one of zeros adds nothing."""
    kept = [value for value in (one, other) if not is_zero(value)]
    is_kept = len(kept) == 1 and _is_alike(kept[0], one) and _is_alike(kept[0], other)
    return kept[0] if is_kept else split.call(node, aten.add.Tensor, one, other)


def _is_alike(one: Node, other: Node) -> bool:
    a, b = tensor_of(one), tensor_of(other)
    return a.shape == b.shape and a.dtype == b.dtype


def _with(split: _Splitting, node: Node, pieces: dict[Node, Node], place: Node | None = None) -> Node:
    """Repeat a call, before `place`, with other operands."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda value: pieces.get(value, value))
    assert callable(node.target)
    return split.call(place or node, node.target, *args, **kwargs)


def _view(split: _Splitting, node: Node) -> _Made:
    """View each part, where its dim stays a dim."""
    source = operands(node)[0]
    parts, shape = split.parts[source], list(tensor_of(node).shape)
    dim = _kept_dim(node, source, parts.dim)
    if dim is None:
        return None
    shapes = ([*shape[:dim], length, *shape[dim + 1 :]] for length in parts.lengths)
    return _Parts(dim, tuple(_viewed(split, node, *pair) for pair in zip(parts.nodes, shapes, strict=True)))


def _viewed(split: _Splitting, node: Node, part: Node, shape: list[int]) -> Node:
    if not is_viewable(tensor_of(part), shape):
        part = split.call(node, aten.clone.default, part, memory_format=torch.contiguous_format)
    return split.call(node, aten.view.default, part, shape)


def _repeat(split: _Splitting, node: Node) -> _Made:
    """Repeat a call that keeps the dim of the parts."""
    source = operands(node)[0]
    dim = _kept_dim(node, source, split.parts[source].dim)
    return None if dim is None else _Parts(dim, _each(split, node))


def _order(node: Node) -> list[int]:
    """Return the dims of a permutation, counted from 0."""
    order = node.args[1]
    assert isinstance(order, list | tuple)
    return [as_int(dim) % len(order) for dim in order]


def _slice(split: _Splitting, node: Node) -> _Made:
    """Take the part, or the slice of a part, that a slice is; slice each part along another dim."""
    source = operands(node)[0]
    parts, dim = split.parts[source], _dim(node, 1)
    if dim != parts.dim:
        return _Parts(parts.dim, _each(split, node))
    start, end = _window(node, tensor_of(source).shape[dim])
    for part, (first, last) in zip(parts.nodes, parts.bounds, strict=True):
        if (start, end, _step(node)) == (first, last, 1):
            return part
        if first <= start and end <= last:
            return split.call(node, aten.slice.Tensor, part, dim, start - first, end - first, _step(node))
    kept = [part for part, (first, last) in zip(parts.nodes, parts.bounds, strict=True) if start <= first and last <= end]
    found = _Parts(dim, tuple(kept))
    return found if kept and _step(node) == 1 and sum(found.lengths) == end - start else None


def _each(split: _Splitting, node: Node) -> tuple[Node, ...]:
    """Repeat a call for each part of its operand."""
    source = operands(node)[0]
    return tuple(_with(split, node, {source: part}) for part in split.parts[source].nodes)


def _mm(split: _Splitting, node: Node) -> _Made:
    """Multiply each part: of rows or columns, to parts of the product; of what is contracted, to terms of a sum."""
    left, right = operands(node)[0], operands(node)[-1]
    of_left, of_right = split.parts.get(left), split.parts.get(right)
    if of_left is not None and of_left.dim == 0 and of_right is None:
        return _Parts(0, tuple(split.call(node, aten.mm.default, part, right) for part in of_left.nodes))
    if of_right is not None and of_right.dim == 1 and of_left is None:
        return _Parts(1, tuple(split.call(node, aten.mm.default, left, part) for part in of_right.nodes))
    contracted = of_left if of_left is not None and of_left.dim == 1 else of_right
    if contracted is None or (of_left is not None and of_left.dim == 0) or (of_right is not None and of_right.dim == 1):
        return None
    pairs = zip(
        split.sliced(left, 1, contracted.lengths, node), split.sliced(right, 0, contracted.lengths, node), strict=True
    )
    first, *others = (split.call(node, aten.mm.default, *pair) for pair in pairs)
    for other in others:
        first = split.call(node, aten.add.Tensor, first, other)
    return first


_ON_PARTS: dict[Any, Callable[[_Splitting, Node], _Made]] = {
    **dict.fromkeys(_REPEATED, _repeat),
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.mm.default: _mm,
}
