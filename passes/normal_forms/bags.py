"""Rewrites of bags of embeddings that all have one length: a lookup, then a sum, as `embedding` has rows for each dim."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import tensor_of
from passes.normal_forms.rewriting import At, as_int

aten = torch.ops.aten
iota = torch.ops.prims.iota.default
_SUM, _MEAN = 0, 1  # `mode` of `_embedding_bag`; 2 is the maximum


@dataclass(frozen=True)
class _Bags:
    """Bags of one length: their elements as `indices[bag, place]`."""

    at: At
    indices: Node
    padding: int  # the index of elements that do not count, -1 for none

    def each(self, elements: Node) -> Node:
        """Return a number per element as one per bag and place."""
        return self.at.call(aten.view.default, elements, list(tensor_of(self.indices).shape))

    def per_element(self, weights: Node) -> Node:
        """Return what multiplies the embedding of each element."""
        return self.at.call(aten.unsqueeze.default, self.each(weights), 2)

    def is_padding(self) -> Node:
        return self.at.call(aten.eq.Scalar, self.indices, self.padding)

    def without_padding(self, value: Node) -> Node:
        """Return `value`, which has a dim more than the indices, with 0 for padding."""
        if self.padding < 0:
            return value
        return self.at.call(aten.masked_fill.Scalar, value, self.at.call(aten.unsqueeze.default, self.is_padding(), 2), 0)

    def averaged(self, value: Node) -> Node:
        """Divide `value[bag, dim]` by the number of elements that count, which is at least 1."""
        if self.padding < 0:
            return self.at.call(aten.div.Tensor, value, tensor_of(self.indices).shape[1])
        counted = self.at.call(aten.bitwise_not.default, self.is_padding())
        count = self.at.call(aten.sum.dim_IntList, counted, [1], True)
        return self.at.call(aten.div.Tensor, value, self.at.call(aten.clamp_min.default, count, 1))


def _bags(at: At, indices: Any, offsets: Any, padding: int) -> _Bags | None:
    """Return the bags if they have one length, as those of a matrix of indices have."""
    if not isinstance(offsets, Node) or offsets.target is not iota:
        return None
    count, length = tensor_of(offsets).shape[0], as_int(offsets.kwargs["step"])
    if offsets.kwargs["start"] != 0 or count * length != tensor_of(indices).numel():
        return None
    return _Bags(at, _matrix(at, indices, (count, length)), padding)


def _matrix(at: At, indices: Node, shape: tuple[int, int]) -> Node:
    viewed = indices.args[0] if indices.target is aten.view.default else None
    if isinstance(viewed, Node) and tensor_of(viewed).shape == shape:
        return viewed
    return at.call(aten.view.default, indices, list(shape))


def _embedding_bag(at: At) -> bool:
    weight, indices, offsets = at.node.args[:3]
    by_frequency, mode, sparse = at.arg(3, "", False), at.arg(4, "", 0), at.arg(5, "", False)
    weights, with_end = at.arg(6, "", None), at.arg(7, "", False)
    firsts = [user for user in at.node.users if user.target is operator.getitem and user.args[1] == 0]
    if by_frequency or sparse or with_end or mode not in (_SUM, _MEAN) or not firsts:
        return False
    bags = _bags(at, indices, offsets, at.arg(8, "", -1))
    if bags is None:
        return False
    found = bags.without_padding(at.call(aten.embedding.default, weight, bags.indices))
    if weights is not None:
        found = at.call(aten.mul.Tensor, found, bags.per_element(weights))
    result = at.call(aten.sum.dim_IntList, found, [1], False)
    if mode == _MEAN:
        result = bags.averaged(result)
    for first in firsts:
        at.at(first).replace(result)
    return True  # the other results are unused once the backward is rewritten


def _embedding_bag_backward(at: At) -> bool:
    grad, indices, offsets = at.node.args[:3]
    rows, by_frequency, mode, sparse, weights = at.node.args[6:11]
    bags = None if by_frequency or sparse or mode == 2 else _bags(at, indices, offsets, at.arg(11, "", -1))
    if bags is None:
        return False
    assert isinstance(grad, Node)
    if mode == _MEAN:
        grad = bags.averaged(grad)
    shape = [*tensor_of(bags.indices).shape, tensor_of(grad).shape[1]]
    each = at.call(aten.expand.default, at.call(aten.unsqueeze.default, grad, 1), shape)
    if isinstance(weights, Node):
        each = at.call(aten.mul.Tensor, each, bags.per_element(weights))
    return at.replace(at.call(aten.embedding_dense_backward.default, each, bags.indices, rows, bags.padding, False))


def _embedding_bag_weights_backward(at: At) -> bool:
    grad, weight, indices, offsets = at.node.args[:4]
    bags = _bags(at, indices, offsets, at.arg(6, "", -1))
    if bags is None:
        return False
    found = bags.without_padding(at.call(aten.embedding.default, weight, bags.indices))
    products = at.call(aten.mul.Tensor, found, at.call(aten.unsqueeze.default, grad, 1))
    summed = at.call(aten.sum.dim_IntList, products, [2], False)
    return at.replace(at.call(aten.view.default, summed, list(tensor_of(at.node).shape)))


REWRITES: dict[Any, Callable[[At], bool]] = {
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _embedding_bag_weights_backward,
}
