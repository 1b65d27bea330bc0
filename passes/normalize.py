"""Fewer forms for the same program, so that later passes and rules have less to know."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import FakeTensorMode, OpOverload, fake_mode_of
from passes.base import Pass, PassContext
from passes.ir.fake_calls import fake_call, is_viewable
from passes.ir.graph import Stage, add_call, copy_facts, is_reshard, set_draw, set_value, tensor_of, value_of

aten = torch.ops.aten
prims = torch.ops.prims

Piece = tuple[Any, tuple[int, ...]]  # an op and its arguments behind the operand


@dataclass(frozen=True)
class Normalize(Pass):
    """Rewrite to one form per meaning, merge equal values, drop dead ones.

    1. `alias`, `detach`, conversions to the same dtype, views to the same shape: gone.
    2. `reshape`, `_unsafe_view`: `view`. `t`, `transpose`: `permute`. A view of a view (a permute of a
       permute) is one.
    3. `addmm` is `mm` and `add`: a partial product can be reduced before the bias is added.
    4. `mean` is `sum` and `div` by the global count: linear, so that it can be partial.
    5. `split` and `unbind` are slices and selects. Filled tensors are `full`.
    6. `var_mean` over dim 0 (batch statistics) is sums, so that the batch can be sharded.
    7. The sum of rows that have one entry each is the entries: with it, the gradient of a cross-entropy never
       needs a whole row of the vocabulary.
    8. Equal calls without side effects and random numbers are one; calls that nobody uses are gone.

    Before:

        mesh tp=2
        stage CAPTURED
        %b: f32[6] = parameter("b")
        %w: f32[8, 6] = parameter("w")
        %x: f32[4, 8] = input("x")
        %addmm: f32[4, 6] = addmm(%b, %x, %w)
        %mean: f32[4] = mean.dim(%addmm, [1])
        return output("output") %mean

    After:

        mesh tp=2
        stage CAPTURED
        %b: f32[6] = parameter("b")
        %w: f32[8, 6] = parameter("w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 6] = mm(%x, %w)
        %add: f32[4, 6] = add.Tensor(%mm, %b)
        %sum_1: f32[4] = sum.dim_IntList(%add, [1], False)
        %div: f32[4] = div.Tensor(%sum_1, 6)
        return output("output") %div
    """

    name: ClassVar[str] = "normalize"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        fake_mode = fake_mode_of([value_of(node) for node in gm.graph.nodes if node.op == "placeholder"])
        for node in list(gm.graph.nodes):
            rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
            if rewrite is not None:
                changed |= rewrite(_At(gm.graph, node, fake_mode))
        changed |= _merge_equal(gm.graph)
        changed |= _drop_dead(gm.graph)
        _number_draws(gm.graph)
        return changed


@dataclass(frozen=True)
class _At:
    """A node to be replaced, and how to add calls in front of it."""

    graph: Graph
    node: Node
    fake_mode: FakeTensorMode

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.node):
            new = add_call(self.graph, op, args, kwargs)
        copy_facts(self.node, new)
        set_value(new, fake_call(self.fake_mode, op, args, kwargs))
        return new

    def at(self, node: Node) -> _At:
        return _At(self.graph, node, self.fake_mode)

    def replace(self, new: Node) -> bool:
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
        return True

    def arg(self, position: int, name: str, default: Any) -> Any:
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)


def _operand(at: _At) -> Node:
    operand = at.node.args[0]
    assert isinstance(operand, Node)
    return operand


def _identity(at: _At) -> bool:
    return at.replace(_operand(at))


def _convert(at: _At) -> bool:
    return tensor_of(_operand(at)).dtype == tensor_of(at.node).dtype and _identity(at)


def _clone(at: _At) -> bool:
    same = tensor_of(_operand(at)).stride() == tensor_of(at.node).stride()
    return same and not _is_returned(at.node) and _identity(at)


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _slice(at: _At) -> bool:
    return tensor_of(_operand(at)).shape == tensor_of(at.node).shape and _identity(at)


def _view(at: _At) -> bool:
    source = _operand(at)
    while source.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        source = _operand(at.at(source))
    shape = list(tensor_of(at.node).shape)
    if list(tensor_of(source).shape) == shape:
        return at.replace(source)
    if source is _operand(at) and at.node.target is aten.view.default and at.node.args[1] == shape:
        return False
    if not is_viewable(tensor_of(source), shape):
        source = at.call(aten.clone.default, source, memory_format=torch.contiguous_format)
    return at.replace(at.call(aten.view.default, source, shape))


def _permute(at: _At) -> bool:
    source, dims = _operand(at), _permutation(at.node)
    chained = False
    while source.target in _PERMUTES:
        inner = _permutation(source)
        dims = [inner[d] for d in dims]
        source, chained = _operand(at.at(source)), True
    if dims == list(range(len(dims))):
        return at.replace(source)
    if not chained and at.node.target is aten.permute.default:
        return False
    return at.replace(at.call(aten.permute.default, source, dims))


_PERMUTES = (aten.permute.default, aten.t.default, aten.transpose.int)


def _permutation(node: Node) -> list[int]:
    ndim = tensor_of(node).dim()
    dims = list(range(ndim))
    if node.target is aten.permute.default:
        given = node.args[1]
        assert isinstance(given, tuple | list)
        return [int(str(d)) % ndim for d in given]
    a, b = (0, ndim - 1) if node.target is aten.t.default else (_int(node.args[1]) % ndim, _int(node.args[2]) % ndim)
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _int(value: Any) -> int:
    assert isinstance(value, int)
    return value


def _addmm(at: _At) -> bool:
    if at.node.kwargs:  # alpha or beta
        return False
    bias, left, right = at.node.args
    product = at.call(aten.mm.default, left, right)
    return at.replace(at.call(aten.add.Tensor, product, bias))


def _mean(at: _At) -> bool:
    operand = tensor_of(_operand(at))
    dims = at.arg(1, "dim", None) if at.node.target is aten.mean.dim else None
    dims = [d % operand.dim() for d in dims] if dims else list(range(operand.dim()))
    kwargs = {"dtype": at.node.kwargs["dtype"]} if at.node.kwargs.get("dtype") is not None else {}
    total = at.call(aten.sum.dim_IntList, _operand(at), dims, at.arg(2, "keepdim", False), **kwargs)
    return at.replace(at.call(aten.div.Tensor, total, math.prod(operand.shape[d] for d in dims)))


def _split(at: _At) -> bool:
    operand = tensor_of(_operand(at))
    dim = at.arg(2, "dim", 0) % operand.dim()
    starts = [0]
    for part in value_of(at.node):
        starts.append(starts[-1] + part.shape[dim])
    pieces: list[Piece] = [(aten.slice.Tensor, (dim, start, end)) for start, end in pairwise(starts)]
    return _replace_items(at, pieces)


def _unbind(at: _At) -> bool:
    dim = at.arg(1, "dim", 0) % tensor_of(_operand(at)).dim()
    return _replace_items(at, [(aten.select.int, (dim, i)) for i in range(len(value_of(at.node)))])


def _replace_items(at: _At, pieces: list[Piece]) -> bool:
    for user in list(at.node.users):
        if user.target is not operator.getitem:
            return False
    for user in list(at.node.users):
        op, args = pieces[_int(user.args[1])]
        place = at.at(user)
        place.replace(place.call(op, _operand(at), *args))
    at.graph.erase_node(at.node)
    return True


def _full(value: float | int) -> Callable[[_At], bool]:
    return lambda at: _filled(at, value)


def _full_like(at: _At) -> bool:
    return _filled(at, at.node.args[1])


def _filled(at: _At, value: Any) -> bool:
    made = tensor_of(at.node)
    if not made.is_contiguous():
        return False
    kwargs = {"dtype": made.dtype, "device": made.device, "pin_memory": False}
    return at.replace(at.call(aten.full.default, list(made.shape), value, **kwargs))


def _var_mean(at: _At) -> bool:
    operand = tensor_of(_operand(at))
    dims = at.arg(1, "dim", None)
    dims = sorted(d % operand.dim() for d in dims) if dims else list(range(operand.dim()))
    if 0 not in dims or any(user.target is not operator.getitem for user in at.node.users):
        return False
    keepdim = bool(at.node.kwargs.get("keepdim", False))
    correction = at.node.kwargs.get("correction")
    count = math.prod(operand.shape[d] for d in dims)
    mean = at.call(aten.div.Tensor, at.call(aten.sum.dim_IntList, _operand(at), dims, True), count)
    centred = at.call(aten.sub.Tensor, _operand(at), mean)
    squares = at.call(aten.sum.dim_IntList, at.call(aten.mul.Tensor, centred, centred), dims, keepdim)
    var = at.call(aten.div.Tensor, squares, count - (1 if correction is None else correction))
    if not keepdim:
        mean = at.call(aten.view.default, mean, list(tensor_of(var).shape))
    for user in list(at.node.users):
        at.at(user).replace((var, mean)[_int(user.args[1])])
    at.graph.erase_node(at.node)
    return True


def _sum(at: _At) -> bool:
    """`sum(scatter(0, dim, index, value) * factor, dim)` is `value * factor`."""
    rows, dims = _operand(at), at.node.args[1]
    if rows.target is not aten.mul.Tensor or len(rows.all_input_nodes) != 2 or not at.arg(2, "keepdim", False):
        return False
    for one_hot, factor in (rows.all_input_nodes, rows.all_input_nodes[::-1]):
        if one_hot.target is not aten.scatter.value:
            continue
        base, dim, index, value = one_hot.args
        assert isinstance(base, Node) and isinstance(index, Node)
        is_zero = base.target is aten.full.default and base.args[1] == 0
        alike = all(tensor_of(node).shape == tensor_of(at.node).shape for node in (index, factor))
        same_dtype = tensor_of(factor).dtype == tensor_of(at.node).dtype
        if is_zero and alike and same_dtype and dims == [_int(dim) % tensor_of(rows).dim()]:
            return at.replace(at.call(aten.mul.Tensor, factor, value))
    return False


def _merge_equal(graph: Graph) -> bool:
    seen: dict[Any, Node] = {}
    merged = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node) or is_reshard(node):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
            merged = True
        else:
            seen[key] = node
    return merged


def _is_pure(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return not _is_random(node) and not node.is_impure()
    return node.target is operator.getitem


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _number_draws(graph: Graph) -> None:
    """Number the random calls, before passes copy or move them: the copies must draw the same numbers."""
    for draw, node in enumerate(filter(_is_random, graph.nodes)):
        set_draw(node, draw)


def _key(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return (type(value).__name__, str(value)) if isinstance(value, float) else (type(value).__name__, value)


def _drop_dead(graph: Graph) -> bool:
    dropped = False
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
            dropped = True
    return dropped


_REWRITES: dict[Any, Callable[[_At], bool]] = {
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.lift_fresh_copy.default: _identity,
    aten.clone.default: _clone,
    prims.convert_element_type.default: _convert,
    aten._to_copy.default: _convert,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.permute.default: _permute,
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.addmm.default: _addmm,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.sum.dim_IntList: _sum,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.full_like.default: _full_like,
    aten.zeros_like.default: _full(0),
    aten.ones_like.default: _full(1),
    aten.zeros.default: _full(0),
    aten.ones.default: _full(1),
    aten.new_zeros.default: _full(0),
    aten.new_ones.default: _full(1),
    aten.var_mean.correction: _var_mean,
}
