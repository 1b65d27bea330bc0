"""Choose the inputs whose positions are padded for context parallelism: those that become positions of attention's queries.

They are found by the rules, backwards from attention; inputs of the same batch and length, such as labels, are padded with
them. Causal kernels take twice as many parts, so that each rank has a chunk of each half.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from passes.ir.call import call_of
from passes.ir.graph import InputRole, input_of, item_of, operands, placeholders, tensor_of
from passes.ir.layout import Shard
from passes.ir.padding import Digit, Padded, Padding, in_dims, in_factor, is_gain, padded_size
from passes.recipes.context_parallel.way_costs import POSITIONS
from passes.recipes.context_parallel.written_out import written_out
from passes.rules.attention import is_attention
from passes.rules.local_forms.attention_pieces import runs_in_blocks
from passes.rules.rule import space_of

HALVES = 2  # of each of which a rank has a chunk


def padded_positions(gm: GraphModule, parts: int) -> tuple[Padded, ...]:
    """Return the inputs to pad so that `parts` divides the positions of attention, in the order of the inputs.

    An input stays as it is where other attention has other positions of it, such as those before they are merged in pairs, and
    `parts` divides these: padding would be cut off before them, and they would be whole on all ranks.
    """
    found, divided = dict[Node, Padding](), dict[Node, set[Digit]]()
    for value, dim, multiple in _queries(gm, parts):
        size = tensor_of(value).shape[dim]
        for node, at, digit in _inputs_of(value, dim, Digit(1, size, 1)):
            if is_gain(size, parts):
                found.setdefault(node, Padding(at, digit, padded_size(size, multiple)))
            elif size % parts == 0:
                divided.setdefault(node, set()).add(digit)
    found = {node: padding for node, padding in found.items() if divided.get(node, set()) <= {padding.digit}}
    inputs = [node for node in placeholders(gm.graph, InputRole.INPUT) if node.users]
    for node, padding in list(found.items()):
        shape = tensor_of(node).shape[: padding.dim + 1]
        alike = (one for one in inputs if one not in found and tensor_of(one).shape[: padding.dim + 1] == shape)
        found |= dict.fromkeys(alike, padding)
    return tuple(Padded(node, found[node], next(iter(node.users))) for node in inputs if node in found)


def _queries(gm: GraphModule, parts: int) -> Iterator[tuple[Node, int, int]]:
    """Yield the queries of each attention, their dim of positions, and what has to divide these."""
    for node in gm.graph.nodes:
        if is_attention(node.target):
            chunks = HALVES if runs_in_blocks(call_of(node)) else 1
            yield operands(node)[0], POSITIONS, parts * chunks
    for one in written_out(gm, lambda length, dim: Shard(dim)):
        yield operands(one.node)[one.queries], one.positions.dim, parts


def _inputs_of(value: Node, dim: int, digit: Digit) -> Iterator[tuple[Node, int, Digit]]:
    """Yield the inputs that have a digit of `dim` of a value, and where they have it."""
    queue, seen = [(value, 0, dim, digit)], set[object]()
    while queue:
        entry = node, number, dim, digit = queue.pop()
        if entry in seen:
            continue
        seen.add(entry)
        if node.op == "placeholder":
            if input_of(node).role is InputRole.INPUT:
                yield node, dim, digit
        elif (item := item_of(node)) is not None:
            queue.append((*item, dim, digit))
        elif (space := space_of(node)) is not None:
            at = in_factor(space.sizes, space.results[number], dim, digit)
            if at is None or at[0] in space.blocked:
                continue
            for operand, dims in zip(operands(node), space.operands, strict=True):
                if (placed := in_dims(space.sizes, dims, *at)) is not None:
                    queue.append((operand, 0, *placed))
