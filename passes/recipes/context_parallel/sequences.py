"""Decide context parallelism on one axis: the sequence of inputs is sharded, and attention runs in one of three ways.

The recipe finds inputs by the rules, backwards from attention: those whose positions become the positions of its queries; of a
model without attention, such as a state-space model, backwards from its convolutions over positions. All else follows by
propagation. Gathering is the way of Llama 3 (Llama Team 2024, section 3.3.2), the ring that of Liu et al.
2023 ("Ring Attention with Blockwise Transformers"), the exchange for heads that of DeepSpeed Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch.fx import GraphModule, Node

from passes.errors import RecipeError
from passes.ir.call import call_of
from passes.ir.graph import (
    InputRole,
    input_of,
    is_reshard,
    item_of,
    operands,
    pins_of,
    placeholders,
    results_of,
    tensor_of,
)
from passes.ir.layout import Shard
from passes.ir.padding import PAD_END, is_gain, padded_forms
from passes.recipes.context_parallel.long_sequences import causal_positions
from passes.recipes.context_parallel.way_costs import POSITIONS
from passes.recipes.context_parallel.ways import EXCHANGE, WAYS, Attention, Uses
from passes.recipes.context_parallel.written_out import GATHER, Written, written_out
from passes.recipes.recipe import Decision, Decisions, Recipe, Site
from passes.recipes.storage import first_dim_that_divides
from passes.rules.attention import is_attention, is_attention_backward, operand_names
from passes.rules.conv import is_convolution
from passes.rules.local_forms.attention_pieces import runs_in_blocks
from passes.rules.rule import row_giving, space_of

_MASK = torch.ops.aten.where.ScalarOther


def shard_sequences(site: Site, way: str | None = None, *, recipe: str = "context") -> Decisions:
    """Decide the axis of `site`: the dims of inputs that become the positions of queries, and how attention runs.

    Without `way`, each call runs in the one that is estimated to be the fastest. `recipe` is named in errors. Where no input is
    found, as where attention reads a text and an image together, those count that the user has sharded.
    """
    found, uses = dict[Node, Shard](), Uses()
    refused, ways = list[tuple[Node, str]](), list[tuple[Attention | Written, str]]()
    for one in _attentions(site, way):
        given = GATHER if ways and isinstance(one, Written) else way  # it only joins those that run in another way
        why = _why_not(one, given, site.size)
        if why:
            refused.append((one.node, why))
        else:
            ways.append((one, given or min((name for name in WAYS if not one.refusal(name)), key=one.seconds)))
    if way is None and not refused and {chosen for _, chosen in ways} == {EXCHANGE}:
        return shard_sequences(site, EXCHANGE, recipe=recipe)  # no call needs a chunk of each half
    for one, chosen in ways:
        for value, reached in _inputs_of(one.before(chosen), site.size):
            found.setdefault(value, reached)
        uses |= one.uses(chosen)
    if way is None and not ways and not refused:
        found.update(_inputs_of(_convolved(site), site.size))
    if not found and (refused or not _is_by_hand(site)):
        axis = site.mesh.names[site.axis]
        name = recipe if way is None else _with_way(recipe, way)
        by_hand = "" if refused else _how_by_hand(site)  # inputs that are sharded by hand do not change what is refused
        raise RecipeError(f"recipe {name!r} on axis {axis!r}: {_why_nothing(site, way, refused, recipe)}{by_hand}")
    _add_alike(site, found)
    places = {value: Decision(placement, "context: sequence") for value, placement in found.items()}
    inputs = {value: decision for value, decision in places.items() if value.op == "placeholder"}
    padded = {value: decision for value, decision in places.items() if value not in inputs}
    whole = f"attention runs whole on all {site.size} ranks"
    remarks = tuple((node, f"{whole}: {why}") for node, why in refused)
    return Decisions(inputs=inputs, values=padded, operands=uses, remarks=remarks)


def _attentions(site: Site, way: str | None) -> list[Attention | Written]:
    """Return all attention: causal calls come first, as they decide how the sequence is cut, and what is written out last."""
    calls = [node for node in site.gm.graph.nodes if is_attention(node.target)]
    is_cut = way != EXCHANGE and any(runs_in_blocks(call_of(node)) for node in calls)

    def cut(length: int, dim: int = POSITIONS) -> Shard:
        return causal_positions(length, site.size, dim) if is_cut else Shard(dim)

    backwards = _backwards(site.gm)
    lengths = ((node, results_of(node)[0].shape[POSITIONS]) for node in calls)
    found = [Attention(node, backwards.get(node), site, cut(length)) for node, length in lengths]
    return [*sorted(found, key=lambda one: one.is_causal, reverse=True), *written_out(site.gm, cut)]


def _backwards(gm: GraphModule) -> dict[Node, Node]:
    """Return the backward of each call of attention that has one: it reads its result, of which padding may be zero."""
    found = {}
    for node in gm.graph.nodes:
        if is_attention_backward(node.target):
            value = operands(node)[operand_names(call_of(node)).index("out")]
            while value.target is _MASK:
                value = operands(value)[1]
            if (item := item_of(value)) is not None:
                found[item[0]] = node
    return found


def _why_not(one: Attention | Written, way: str | None, size: int) -> str:
    """Return why a call runs in no way, or not in the one that is given; empty if it does."""
    if one.length % size:
        inputs = placeholders(one.node.graph, InputRole.INPUT)
        given = any(one.length in tensor_of(node).shape for node in inputs)
        cause = "where a convolution reads neighbouring positions" if given else "no input has it: a class token adds to one"
        reason = f", and cannot be padded, as {cause}" if is_gain(one.length, size) else ""
        return f"a length of {one.length} does not divide by {size}{reason}; pad it to a multiple of {size}"
    refusals = [one.refusal(name) for name in ((way,) if way is not None else WAYS)]
    return refusals[0] if all(refusals) else ""


def _is_by_hand(site: Site) -> bool:
    """Return whether the user shards an input on the axis."""
    pins = (pin for node in placeholders(site.gm.graph, InputRole.INPUT) for pin in pins_of(node))
    return any(pin.axis == site.axis and isinstance(pin.placement, Shard) for pin in pins)


def _convolved(site: Site) -> list[tuple[Node, Shard]]:
    """Return the operands of convolutions over one dim of positions, and how they are sharded."""
    calls = (node for node in site.gm.graph.nodes if is_convolution(node.target) and tensor_of(node).dim() == 3)
    return [(operands(node)[0], Shard(2)) for node in calls if (space := space_of(node)) is not None and space.reaches]


def _inputs_of(sharded: Iterable[tuple[Node, Shard]], size: int) -> Iterator[tuple[Node, Shard]]:
    """Yield the inputs that become positions of sharded values, by the rules, and how they are sharded; if positions were
    padded, the padded forms.
    """
    seen = set[object]()
    queue = [(value, 0, placement) for value, placement in sharded]
    while queue:
        entry = node, number, placement = queue.pop()
        if entry in seen:
            continue
        seen.add(entry)
        if node.op == "placeholder":
            if input_of(node).role is InputRole.INPUT:
                yield node, placement
        elif node.target is PAD_END and node.args[1] == placement.dim:
            if _is_input(node):
                yield node, placement
        elif (item := item_of(node)) is not None:
            queue.append((*item, placement))
        elif is_reshard(node):
            queue.append((operands(node)[0], 0, placement))
        elif (space := space_of(node)) is not None and (row := row_giving(space, number, placement, size)) is not None:
            needs = zip(operands(node), row.operands, strict=True)
            queue += [(operand, 0, need) for operand, need in needs if isinstance(need, Shard)]


def _is_input(value: Node) -> bool:
    """Return whether a value is an input, or a padded form of one."""
    while value.target is PAD_END or is_reshard(value):
        value = operands(value)[0]
    return value.op == "placeholder" and input_of(value).role is InputRole.INPUT


def _why_nothing(site: Site, way: str | None, refused: list[tuple[Node, str]], recipe: str) -> str:
    if not _attentions(site, None):
        return (
            "the model has no attention, neither a kernel nor a softmax between two products, nor a convolution over positions; "
            "call torch.nn.functional.scaled_dot_product_attention"
        )
    if refused:
        return f"attention cannot be sharded: {refused[0][1]}{_other_ways(site, way, recipe)}"
    return "the positions of attention's queries are no dim of an input; use another recipe"


def _how_by_hand(site: Site) -> str:
    """Return a text that says how the first input of several dims is sharded by hand; empty if there is none."""
    inputs = placeholders(site.gm.graph, InputRole.INPUT)
    names = [input_of(node).name for node in inputs if tensor_of(node).dim() > 1]
    axis = site.mesh.names[site.axis]
    return f", or shard inputs by hand, such as Options(inputs={{{names[0]!r}: {{{axis!r}: Shard(1)}}}})" if names else ""


def _add_alike(site: Site, found: dict[Node, Shard]) -> None:
    """Add inputs of the same batch and positions that attention does not depend on: labels."""
    like = {tensor_of(value).shape[: placement.dim + 1]: placement for value, placement in found.items()}
    inputs = placeholders(site.gm.graph, InputRole.INPUT)
    for value in (form for node in inputs for form in (node, *padded_forms(node))):
        for shape, placement in like.items():
            if value not in found and tensor_of(value).shape[: placement.dim + 1] == shape:
                found[value] = placement


def _other_ways(site: Site, way: str | None, recipe: str) -> str:
    """Return a text that names the ways in which all attention can run, empty if there is none."""
    others = (other for other in WAYS if other != way)
    able = [one for one in others if not any(_why_not(call, one, site.size) for call in _attentions(site, one))]
    return f"; use {' or '.join(_with_way(recipe, one) for one in able)}" if able else ""


_STORED = "; parameters are stored sharded, as in fsdp"
_SUMMARIES = {
    None: "sequences of inputs are split; attention runs in the fastest of the ways below",
    "gather": "sequences of inputs are split; attention gathers keys and values",
    "ring": "sequences of inputs are split; keys and values go around a ring of neighbours",
    "all_to_all": "sequences of inputs are split; attention exchanges positions for heads",
}


def _recipe(name: str, way: str | None, *, is_stored: bool) -> Recipe:
    return Recipe(
        name if way is None else _with_way(name, way),
        _SUMMARIES[way] + (_STORED if is_stored else ""),
        carries_sequence=True,
        decide=partial(shard_sequences, way=way, recipe=name),
        store=first_dim_that_divides if is_stored else None,
        frees_gathered=is_stored,
        variants=tuple(_with_way(name, one) for one in WAYS) if way is None else (),
        in_search=False,
    )


def _with_way(name: str, way: str) -> str:
    return f"{name}({way})"


CONTEXT = _recipe("context", None, is_stored=False)
CONTEXT_WAYS = tuple(_recipe("context", way, is_stored=False) for way in WAYS)
FSDP_CONTEXT = tuple(_recipe("fsdp_context", way, is_stored=True) for way in (None, *WAYS))
