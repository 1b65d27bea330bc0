"""Rewrites of padded or cut convolutions to aligned ones, whose results have one position for each stride of inputs.

A causal convolution is a pad and a convolution, or a convolution with padding on both sides and a slice. Its values of other
lengths could not be sharded by position.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from passes._torch import (
    ALIGNED_CONVOLUTION,
    ALIGNED_CONVOLUTION_INPUT,
    ALIGNED_CONVOLUTION_WEIGHT,
    FakeTensorMode,
)
from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int

aten = torch.ops.aten

Span = tuple[int, int]  # start and end


def align_convolutions(graph: Graph, fake_mode: FakeTensorMode) -> bool:
    """Rewrite the convolutions of a graph, and the sums of what was cut; return whether there were any."""
    found = [node for node in graph.nodes if node.target in _ALIGN]
    return any([_ALIGN[node.target](At(graph, node, fake_mode)) for node in found])


@dataclass(frozen=True)
class _Convolution:
    """A convolution without bias, and what was padded and cut around it: spans of its results, by dim."""

    value: Node
    weight: Node
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    pads: Mapping[int, Span]  # of the value: lengths before and after, by dim

    @staticmethod
    def of(value: Node, weight: Node, settings: Sequence[Any]) -> _Convolution | None:
        stride, padding, dilation, transposed, _, groups = settings
        count, ndim = tensor_of(value).dim() - 2, tensor_of(weight).dim()
        if transposed or ndim != count + 2:
            return None
        source, pads = _unpadded(value)
        stride, padding, dilation = ([*one] * (count if len(one) == 1 else 1) for one in (stride, padding, dilation))
        return _Convolution(source, weight, stride, padding, dilation, groups, pads)

    def aligned(self, cut: Mapping[int, Span], made: Sequence[int]) -> tuple[Any, ...] | None:
        """Return the settings of the aligned convolution of `made` results, from `cut`; None if there is none."""
        before = []
        for number, length in enumerate(made):
            dim, stride = 2 + number, self.stride[number]
            start = self.pads.get(dim, (0, 0))[0] + self.padding[number] - cut.get(dim, (0, 0))[0] * stride
            if start < 0 or length * stride != tensor_of(self.value).shape[dim]:
                return None
            before.append(start)
        return self.stride, before, self.dilation, self.groups


def _unpadded(value: Node) -> tuple[Node, Mapping[int, Span]]:
    """Return what was padded with zeros, and the lengths that were added before and after, by dim of positions."""
    if value.target is not aten.constant_pad_nd.default or (len(value.args) > 2 and value.args[2] != 0):
        return value, {}
    source, pads = _pads(value)
    if min(dim for dim in pads) < 2 or any(length < 0 for span in pads.values() for length in span):
        return value, {}
    return source, pads


def _pads(value: Node) -> tuple[Node, dict[int, Span]]:
    source, flat = value.args[:2]
    assert isinstance(source, Node) and isinstance(flat, list | tuple)
    lengths = [as_int(length) for length in flat]
    last = tensor_of(value).dim() - 1
    return source, {last - i: (lengths[2 * i], lengths[2 * i + 1]) for i in range(len(lengths) // 2)}


def _forward(at: At) -> bool:
    value, weight, bias, *settings = at.node.args
    assert isinstance(value, Node) and isinstance(weight, Node)
    one = _Convolution.of(value, weight, settings) if bias is None else None
    if one is None:
        return False
    biased = _with_bias(at.node)
    cuts = _cuts(biased)
    made = list(tensor_of(cuts[0] if cuts else at.node).shape[2:])
    aligned = one.aligned(_cut(cuts[0]) if cuts else {}, made)
    if aligned is None or not (one.pads or cuts):
        return False
    new = at.call(ALIGNED_CONVOLUTION, one.value, one.weight, *aligned)
    if cuts and biased is not at.node:
        new = at.at(biased).call(aten.add.Tensor, new, *biased.args[1:])
    for old in cuts or [at.node]:
        old.replace_all_uses_with(new)
    return True


def _with_bias(node: Node) -> Node:
    """Return the sum of a convolution and its bias, if nothing else reads the convolution."""
    user = next(iter(node.users), node)
    if len(node.users) > 1 or user.target is not aten.add.Tensor or user.args[0] is not node or user.kwargs:
        return node
    bias = user.args[1]
    is_bias = isinstance(bias, Node) and all(size == 1 for size in tensor_of(bias).shape[1:])
    return user if is_bias and tensor_of(user).shape == tensor_of(node).shape else node


def _cuts(node: Node) -> list[Node]:
    """Return the slices of positions that read a value, if they are equal and nothing else does."""
    users = list(node.users)
    if any(user.target is not aten.slice.Tensor or len(user.args) < 4 or user.args[0] is not node for user in users):
        return []
    spans = [_cut(user) for user in users]
    return users if all(span == spans[0] and min(span) >= 2 for span in spans) else []


def _cut(node: Node) -> Mapping[int, Span]:
    """Return the span that a slice takes, by its dim; of one with a step, that of no dim."""
    source, dim, start, _, *step = node.args
    assert isinstance(source, Node)
    return _span(source, node, as_int(dim), as_int(start), [as_int(one) for one in step])


def _span(whole: Node, part: Node, dim: int, start: int, step: Sequence[int]) -> Mapping[int, Span]:
    dim %= tensor_of(whole).dim()
    length = tensor_of(whole).shape[dim]
    start = max(0, start + length if start < 0 else start)
    return {dim: (start, start + tensor_of(part).shape[dim])} if step in ([], [1]) else {-1: (0, 0)}


def _backward(at: At) -> bool:
    grad, value, weight, _, *settings, mask = at.node.args
    assert isinstance(grad, Node) and isinstance(value, Node) and isinstance(weight, Node) and isinstance(mask, list | tuple)
    one = _Convolution.of(value, weight, settings)
    items = list(at.node.users)
    if one is None or mask[2] or any(item.target is not operator.getitem for item in items):
        return False
    grad, cut = _written(grad)
    aligned = one.aligned(cut, tensor_of(grad).shape[2:])
    of_value = [user for item in items if item.args[1] == 0 for user in (item.users if one.pads else [item])]
    if aligned is None or not (one.pads or cut) or not all(_is_cut_back(user, one.pads) for user in of_value):
        return False
    for item in items:
        if item.args[1] == 1:
            at.at(item).replace(at.call(ALIGNED_CONVOLUTION_WEIGHT, grad, one.value, weight, *aligned))
    for user in of_value:
        at.at(user).replace(at.call(ALIGNED_CONVOLUTION_INPUT, grad, weight, *aligned))
    return True


def _is_cut_back(node: Node, pads: Mapping[int, Span]) -> bool:
    """Return whether a node cuts off the gradient of what was padded."""
    if not pads:
        return True
    if node.target is not aten.constant_pad_nd.default:
        return False
    return _pads(node)[1] == {dim: (-before, -after) for dim, (before, after) in pads.items()}


def _written(grad: Node) -> tuple[Node, Mapping[int, Span]]:
    """Return the gradient of a slice of positions, and that slice; the gradient itself if it is none of a slice."""
    if grad.target is not aten.slice_scatter.default or len(grad.args) < 5:
        return grad, {}
    base, written, dim, start, _, *step = grad.args
    assert isinstance(base, Node) and isinstance(written, Node)
    cut = _span(grad, written, as_int(dim), as_int(start), [as_int(one) for one in step])
    is_zero = base.target is aten.full.default and base.args[1] == 0
    return (written, cut) if is_zero and min(cut) >= 2 else (grad, {})


def _sum(at: At) -> bool:
    """Sum what was written into zeros instead of the whole."""
    written, cut = _written(at.operand)
    dims = at.node.args[1]
    if not cut or not isinstance(dims, list | tuple):
        return False
    if not set(cut) <= {as_int(dim) % tensor_of(written).dim() for dim in dims}:
        return False
    return at.replace(at.call(aten.sum.dim_IntList, written, *at.node.args[1:], **at.node.kwargs))


_ALIGN: dict[Any, Callable[[At], bool]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
    aten.sum.dim_IntList: _sum,
}
