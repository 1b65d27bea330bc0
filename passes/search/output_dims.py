"""Find the dims of the first input in what a graph returns, also inside of a merged dim, as the batch in `logits.view(-1, V)`.

A dim is followed through the graph by the rules, as a sharding over an axis with a rank for each of its elements. So a dim that
is as long by chance is not taken for it, nor one that merges the batch inside of another dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import GraphModule, Node

from passes.ir.graph import (
    InputRole,
    OutputRole,
    is_reshard,
    is_tensor,
    item_of,
    operands,
    outputs_of,
    placeholders,
    results_of,
    returned,
    tensor_of,
)
from passes.ir.layout import Shard
from passes.rules.rule import row_sharding, space_of

Places = dict[int, Shard]  # by dim of the first input: the dim and digit that it is
_Found = dict[Node, tuple[tuple[Shard, ...], ...]]  # where a dim is in each result of a node


def output_dims(gm: GraphModule) -> dict[str, Places]:
    """Return where the dims of the first input are, of each output whose rows are those of the batch, in order of its samples.

    These have dim 0 of the input as the first digit of theirs, so that each rank's rows are those of its own samples.
    """
    inputs = [node for node in placeholders(gm.graph, InputRole.INPUT) if tensor_of(node).dim() > 0]
    ends = {
        output.name: value
        for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True)
        if output.role is OutputRole.OUTPUT and isinstance(value, Node) and is_tensor(value) and tensor_of(value).dim() > 0
    }
    if not (inputs and ends):
        return {}
    calls = _leading_to(ends.values(), gm)
    first = tuple(tensor_of(inputs[0]).shape)
    found: dict[str, Places] = {}
    for dim in range(len(first)):
        alike = [node for node in inputs if tuple(tensor_of(node).shape[: dim + 1]) == first[: dim + 1]]
        at = _followed(calls, alike, Shard(dim), first[dim])
        for name, value in ends.items():
            places = at[value][0] if value in at else ()
            if dim == 0 and Shard(0) in places:
                found[name] = {0: Shard(0)}
            elif name in found and places:
                found[name][dim] = Shard(dim) if Shard(dim) in places else places[0]
        if not found:
            break
    return found


def followed(placement: Shard, shape: Sequence[int], output: Sequence[int], places: Mapping[int, Shard]) -> Shard | None:
    """Return the sharding of an output where the first input, of this `shape`, has `placement`.

    It is that of the input's dim in the output, if `places` has it, or else of the same dim, if it is as long; None if it is not.
    """
    dim = placement.dim
    if dim in places:
        return Shard(places[dim].dim, places[dim].outer * placement.outer, placement.mirror)
    return placement if dim < len(output) and shape[dim] == output[dim] else None


def _leading_to(ends: Iterable[Node], gm: GraphModule) -> list[Node]:
    """Return the calls that outputs are computed by, in order."""
    pending, seen = list(ends), set[Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return [node for node in gm.graph.nodes if node in seen and node.op == "call_function"]


def _followed(calls: Sequence[Node], inputs: Sequence[Node], placement: Shard, size: int) -> _Found:
    """Return where a dim of `inputs`, of this size, is in the results of `calls`."""
    found: _Found = {node: ((placement,),) for node in inputs if size > 1}
    for node in calls:
        item = item_of(node)
        if item is not None and item[0] in found:
            found[node] = (found[item[0]][item[1]],)
        elif item is None and any(operand in found for operand in operands(node)):
            found[node] = _in_results(node, found, size)
    return found


def _in_results(node: Node, found: _Found, size: int) -> tuple[tuple[Shard, ...], ...]:
    """Return where the dim is in each result of a call: where a row has it that splits the dim in an operand."""
    if is_reshard(node):
        return found[operands(node)[0]]
    space = space_of(node)
    if space is None:
        return ((),) * len(results_of(node))
    rows = [
        row_sharding(space, number, place, size)
        for number, operand in enumerate(operands(node))
        for place in (found[operand][0] if operand in found else ())
    ]
    at = (dict.fromkeys(row.results[number] for row in rows if row is not None) for number in range(len(results_of(node))))
    return tuple(tuple(one for one in places if isinstance(one, Shard)) for places in at)
