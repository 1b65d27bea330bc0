"""Decide context parallelism on one axis: the sequence of inputs is sharded, and attention gathers keys and values.

The way of Llama 3 (Llama Team 2024, section 3.3.2). The recipe finds inputs by the rules, backwards from attention: those
whose positions become the positions of its queries. All else follows by propagation.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from passes.errors import RecipeError
from passes.ir.graph import InputRole, input_of, is_reshard, item_of, operands, placeholders, results_of, tensor_of
from passes.ir.layout import Shard
from passes.recipes.recipe import Decision, Decisions, Recipe, Site
from passes.rules.attention import is_attention
from passes.rules.rule import call_of, row_giving, space_of

# Blocks of a sequence for causal attention, of each of which a rank has a part. Of the pairs of a query and a key that are
# needed, `passes/rules/local_forms/causal.py` then computes up to 1.25 times as many, in 11 calls of the kernel; with 8
# blocks 1.125 times, in 23 calls.
BLOCKS = 4

_POSITIONS = 2  # the dim of positions in an attention's result


def shard_sequences(site: Site) -> Decisions:
    """Decide the axis of `site`: the dims of inputs that become the positions of queries."""
    found: dict[Node, Shard] = {}
    refused: list[tuple[Node, str]] = []
    calls = [node for node in site.gm.graph.nodes if is_attention(node.target)]
    for node in sorted(calls, key=_is_causal, reverse=True):  # causal ones first: the others take any digit
        placement = _placement(node, site.size)
        if isinstance(placement, str):
            refused.append((node, placement))
        else:
            for value, reached in _inputs_of(node, placement, site.size):
                found.setdefault(value, reached)
    if not found:
        axis = site.mesh.names[site.axis]
        raise RecipeError(
            f"recipe 'context' on axis {axis!r}: {_why_nothing(calls, refused)}, or shard inputs by hand, such as "
            f"Options(inputs={{'tokens': {{{axis!r}: Shard(1)}}}})"
        )
    _add_alike(site, found)
    inputs = {value: Decision(placement, "context: sequence") for value, placement in found.items()}
    whole = f"attention runs whole on all {site.size} ranks"
    return Decisions(inputs=inputs, remarks=tuple((node, f"{whole}: {why}") for node, why in refused))


def _is_causal(node: Node) -> bool:
    return bool(call_of(node).arg("is_causal"))


def _placement(node: Node, size: int) -> Shard | str:
    """Return the placement of an attention's result, or why there is none."""
    length = results_of(node)[0].shape[_POSITIONS]
    if length % size:
        return f"{length} positions do not divide by {size}; pad them to a multiple of {size}"
    outer = BLOCKS if _is_causal(node) else 1
    while length % (outer * size):
        outer //= 2
    placement, space = Shard(_POSITIONS, outer), space_of(node)
    if space is None or row_giving(space, 0, placement, size) is None:
        return (
            "no rule shards the positions of this call; leave out dropout, a mask beside is_causal, and is_causal where keys "
            "have another length"
        )
    return placement


def _inputs_of(node: Node, placement: Shard, size: int) -> Iterator[tuple[Node, Shard]]:
    """Yield the inputs that give a call's first result this placement, by the rules, and how they are sharded."""
    queue, seen = [(node, 0, placement)], set()
    while queue:
        entry = node, number, placement = queue.pop()
        if entry in seen:
            continue
        seen.add(entry)
        if node.op == "placeholder":
            if input_of(node).role is InputRole.INPUT:
                yield node, placement
        elif (item := item_of(node)) is not None:
            queue.append((*item, placement))
        elif is_reshard(node):
            queue.append((operands(node)[0], 0, placement))
        elif (space := space_of(node)) is not None and (row := row_giving(space, number, placement, size)) is not None:
            needs = zip(operands(node), row.operands, strict=True)
            queue += [(operand, 0, need) for operand, need in needs if isinstance(need, Shard)]


def _why_nothing(calls: list[Node], refused: list[tuple[Node, str]]) -> str:
    if not calls:
        return (
            "the model calls no kernel of attention (on CPU, one with dropout is written out as products); call "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    if refused:
        return f"attention cannot be sharded: {refused[0][1]}"
    return "the positions of attention's queries are no dim of an input; use another recipe"


def _add_alike(site: Site, found: dict[Node, Shard]) -> None:
    """Add inputs of the same batch and positions that attention does not depend on: labels."""
    like = {tensor_of(value).shape[: placement.dim + 1]: placement for value, placement in found.items()}
    for value in placeholders(site.gm.graph, InputRole.INPUT):
        for shape, placement in like.items():
            if value not in found and tensor_of(value).shape[: placement.dim + 1] == shape:
                found[value] = placement


CONTEXT = Recipe(
    "context",
    "sequences of inputs are split; attention gathers keys and values",
    decide=shard_sequences,
    in_search=False,
)
