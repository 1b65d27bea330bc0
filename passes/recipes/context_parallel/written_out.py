"""Attention that a model writes out: a product of queries and keys, a softmax, and a product with values.

Torch writes out its own on CPU where it has dropout. Each row of the weights is one query's, so that queries stay sharded as
the rules say; keys and values are gathered before they are repeated for more heads, and again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from passes.ir.graph import OutputRole, operands, outputs_of, results_of, returned, tensor_of
from passes.ir.layout import Partial, Placement, R, Shard
from passes.recipes.context_parallel.ways import Uses
from passes.recipes.recipe import Decision
from passes.recipes.weights import weights_of
from passes.rules.rule import Row, factor_row, row_sharding, space_of

aten = torch.ops.aten

GATHER = "gather"
_PRODUCTS: dict[object, tuple[int, int]] = {  # the numbers of the factors
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (1, 2),
}

Taken = tuple[Node, int]  # a call, and the number of an operand


@dataclass(frozen=True)
class Written:
    """A product of queries and keys whose softmax weighs values, and the piece of the sequence that a rank has."""

    node: Node
    queries: int  # the number of their operand
    positions: Shard  # of the queries, in that operand
    length: int
    keys: Taken  # where keys are taken whole
    values: Taken
    weights: Taken  # of the values, with a row for each query

    is_causal = False  # a mask is data here: no call counts positions

    def refusal(self, way: str) -> str:
        """Return why the attention cannot run in a way; empty if it can."""
        if way == GATHER:
            return ""
        return "attention that the model, or torch, writes out as products is neither passed around nor exchanged"

    def seconds(self, way: str) -> float:
        """Return the seconds of a layer; there is no other way to compare with."""
        return 0.0

    def before(self, way: str) -> Iterator[tuple[Node, Shard]]:
        """Yield the operands whose positions are sharded where they come from, and how: masks come with the weights."""
        yield operands(self.node)[self.queries], self.positions
        product, number = self.weights
        row = _free_row(product, number)
        if row is not None and isinstance(at := row.operands[number], Shard):
            weights = operands(product)[number]
            if tensor_of(weights).shape[at.dim] == self.length:
                yield weights, replace(self.positions, dim=at.dim)

    def uses(self, way: str) -> Uses:
        """Return how calls take queries, keys and values."""
        return {
            (self.node, self.queries): Decision(self.positions, f"context({way}): queries"),
            self.keys: Decision(R, f"context({way}): keys", again=True),
            self.values: Decision(R, f"context({way}): values", again=True),
        }


def written_out(gm: GraphModule, cut: Callable[[int, int], Shard]) -> tuple[Written, ...]:
    """Return the written-out attention of a graph; `cut` says how a rank has positions, from their number and dim."""
    forward = _Forward(gm)
    found = (forward.attention(node, cut) for node in forward.nodes if node.target in _PRODUCTS)
    return tuple(one for one in found if one is not None)


class _Forward:
    """The calls of a forward, and how an index is carried through them."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = _needed_by_outputs(gm)
        self.weights = weights_of(gm.graph)

    def attention(self, node: Node, cut: Callable[[int, int], Shard]) -> Written | None:
        """Return the attention that begins with the product `node`, None if none does."""
        factors = _PRODUCTS[node.target]
        if any(operands(node)[number] in self.weights for number in factors):
            return None
        for queries, keys in (factors, factors[::-1]):
            row, key_row = _free_row(node, queries), _free_row(node, keys)
            at = None if row is None else row.operands[queries]
            if row is None or key_row is None or not isinstance(at, Shard):
                continue
            weights = self._softmax_of(node, key_row.results[0])
            if weights is not None and self._reaches(node, row.results[0], weights):
                length = tensor_of(operands(node)[queries]).shape[at.dim]
                places = self._smallest(node, keys), self._smallest(weights[0], _other(*weights))
                return Written(node, queries, cut(length, at.dim), length, *places, weights)
        return None

    def _softmax_of(self, node: Node, placement: Placement) -> Taken | None:
        """Return the product that sums over an index of `node` after a softmax, and the number of its operand that has it."""
        for user, number, result, is_softmax in self._carried(node, placement):
            if is_softmax and number in _PRODUCTS.get(user.target, ()) and result == Partial():
                return user, number
        return None

    def _reaches(self, node: Node, placement: Placement, taken: Taken) -> bool:
        """Return whether an operand still has an index of `node`, so that its rows are those of queries."""
        found = ((user, number) for user, number, result, _ in self._carried(node, placement) if isinstance(result, Shard))
        return taken in found

    def _carried(self, node: Node, placement: Placement) -> Iterator[tuple[Node, int, Placement, bool]]:
        """Yield the calls that read an index of `node`: the call, the number of the operand, how the result has the index,
        and whether a softmax is before it."""
        assert isinstance(placement, Shard)
        length, seen = tensor_of(node).shape[placement.dim], set[tuple[Node, bool]]()
        queue: list[tuple[Node, Placement, bool]] = [(node, placement, False)]
        while queue:
            value, at, is_softmax = queue.pop(0)
            if not isinstance(at, Shard) or (value, is_softmax) in seen:
                continue
            seen.add((value, is_softmax))
            for user in value.users:
                if user not in self.nodes or (space := space_of(user)) is None:
                    continue
                number = operands(user).index(value)
                row = row_sharding(space, number, at, length)
                if row is None:
                    continue
                yield user, number, row.results[0], is_softmax
                queue.append((user, row.results[0], is_softmax or user.target is aten.exp.default))

    def _smallest(self, user: Node, number: int) -> Taken:
        """Return where a value first has the fewest bytes on its way to an operand, through calls that only repeat or move
        it."""
        best, fewest = (user, number), _bytes(operands(user)[number])
        while self._only_moves(value := operands(user)[number]):
            user, number = value, 0
            if (size := _bytes(operands(user)[0])) <= fewest:
                best, fewest = (user, 0), size
        return best

    def _only_moves(self, value: Node) -> bool:
        if value not in self.nodes or sum(user in self.nodes for user in value.users) > 1:
            return False
        space = space_of(value)
        return len(operands(value)) == 1 and space is not None and len(results_of(value)) == 1 and bool(space.linear)


def _needed_by_outputs(gm: GraphModule) -> dict[Node, None]:
    """Return the calls of which the model's outputs are made, in order."""
    outputs = zip(returned(gm.graph), outputs_of(gm.graph), strict=True)
    queue = [value for value, output in outputs if output.role is not OutputRole.GRADIENT and isinstance(value, Node)]
    needed = set[Node]()
    while queue:
        if (value := queue.pop()) not in needed:
            needed.add(value)
            queue += value.all_input_nodes
    return dict.fromkeys(node for node in gm.graph.nodes if node in needed and node.op == "call_function")


def _other(product: Node, number: int) -> int:
    """Return the number of the other factor of a product."""
    factors = _PRODUCTS[product.target]
    return factors[1 - factors.index(number)]


def _free_row(product: Node, number: int) -> Row | None:
    """Return the row that shards the index that only one factor of a product has, on as many ranks as it is long."""
    space = space_of(product)
    if space is None:
        return None
    index, others = ({f for dim in space.operands[i] for f in dim} for i in (number, _other(product, number)))
    free = [factor for factor in space.sizes if factor in index - others]
    return factor_row(space, free[0], 1, space.sizes[free[0]]) if len(free) == 1 and space.sizes[free[0]] else None


def _bytes(value: Node) -> int:
    tensor = tensor_of(value)
    return tensor.numel() * tensor.element_size()
