"""Fold a model of many equal layers into one of a few, so that planning time does not grow with depth.

A layer is the part of the graph that belongs to `layers.7`, say: parameters, forward and backward calls, gradients.
Two layers are equal iff they are the same sequence of calls, with operands at the same relative place: in the same
layer, in a neighbour, or the same value outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.equal_layers import Indexed, Layer, Layers, depth_of
from passes.ir.folded_layers import Repeats, Run, index_in
from passes.ir.graph import (
    Output,
    OutputRole,
    Stage,
    input_of,
    output_node,
    outputs_of,
    returned,
    set_outputs,
    set_repeats,
)

MAX_PERIOD = 4  # layers; most models alternate sliding and global attention, or dense and MoE, with a period of 2 to 4


class Kept(Enum):
    """Says what of a run of equal layers stays in a forward graph."""

    FIRST = "the layer before the run, if it and the one after it are equal to the others inside"
    ENDS = "the layers before and after the run, if they are equal to the others inside"
    PERIOD = "a period, if a layer follows the run"
    PERIODS = "a period on either side"


@dataclass(frozen=True)
class Fold(Pass):
    """Remove all but a few of the equal layers of a model, and remember them as `Repeats` of the graph.

    1. Layers are the modules of a list, `layers.0`, `layers.1`, ...; of nested lists, the one that removes most nodes
       is folded. A call without a module, such as the sum of two gradients, belongs to the layer of its latest operand.
       A value that depends on no layer and is used by several belongs to none.
    2. Of a run of equal layers the first and the last are kept. Layers that alternate with a period of up to
       `MAX_PERIOD` are equal to those a period away, and a period is kept on both sides. `margin` more are kept
       outside of these: a fused kernel or a saved value at the end of a run may reach into the next layer.
    3. The layers around the removed ones become neighbours: the next layer's forward takes the values of the layer
       kept below, the backward of the layer below those of the next layer.
    4. If a value of a layer is used beyond its neighbours, all layers are kept.
    5. Of a forward graph whose backward will be traced, `forward` says what is kept; layers are equal inside if they
       differ in nothing but what they read of others, and what reads them. A call without a module belongs to the layer
       before it, and its backward to the one after it: if such calls next to the run are not those in it, the run is kept
       as in 2, with one more layer on either side.

    `distinct` are parameters, by FQN, that options single out, each with a tag: layers are equal only if the tags
    of their parameters are.

    Before:

        mesh tp=2
        stage CAPTURED
        %w0: f32[8, 8] = parameter("layers.0.w")
        %w1: f32[8, 8] = parameter("layers.1.w")
        %w2: f32[8, 8] = parameter("layers.2.w")
        %w3: f32[8, 8] = parameter("layers.3.w")
        %w4: f32[8, 8] = parameter("layers.4.w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 8] = mm(%x, %w0)      # net.py:5 layers.0
        %mm_1: f32[4, 8] = mm(%mm, %w1)      # net.py:5 layers.1
        %mm_2: f32[4, 8] = mm(%mm_1, %w2)      # net.py:5 layers.2
        %mm_3: f32[4, 8] = mm(%mm_2, %w3)      # net.py:5 layers.3
        %mm_4: f32[4, 8] = mm(%mm_3, %w4)      # net.py:5 layers.4
        return output("output") %mm_4

    After:

        mesh tp=2
        stage CAPTURED
        %w0: f32[8, 8] = parameter("layers.0.w")
        %w1: f32[8, 8] = parameter("layers.1.w")
        %w3: f32[8, 8] = parameter("layers.3.w")
        %w4: f32[8, 8] = parameter("layers.4.w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 8] = mm(%x, %w0)      # net.py:5 layers.0
        %mm_1: f32[4, 8] = mm(%mm, %w1)      # net.py:5 layers.1
        %mm_3: f32[4, 8] = mm(%mm_1, %w3)      # net.py:5 layers.3
        %mm_4: f32[4, 8] = mm(%mm_3, %w4)      # net.py:5 layers.4
        return output("output") %mm_4
    """

    name: ClassVar[str] = "fold"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    distinct: tuple[tuple[str, str], ...] = ()  # FQN of a parameter or buffer, tag
    margin: int = 0  # equal layers kept in addition on either side, next to layers that differ; effects of these reach no further
    forward: Kept | None = None  # None: the graph has its backward

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        graph = Indexed.of(gm.graph, dict(self.distinct))
        foldings = []
        for level in range(depth_of(graph)):
            layers = Layers.of(graph, level)
            foldings += [self._fold_list(layers, prefix, indices) for prefix, indices in layers.lists()]
        chosen = _chosen(foldings)
        for folding in foldings:
            for node, why in folding.declined:
                ctx.remark(self, node, why)
        for folding in chosen:
            for run in folding.runs:
                ctx.remark(self, output_node(gm.graph), f"{run}", routine=True)
        _apply(gm, graph, chosen)
        return bool(chosen)

    def _fold_list(self, layers: Layers, prefix: str, indices: tuple[int, ...]) -> _Folding:
        """Return the folding of a list."""
        if self.forward is None:
            return _folding(layers, prefix, indices, self.margin)
        found = _folding(layers, prefix, indices, self.margin, keeps_last=self.forward is Kept.PERIODS)
        if self.forward in (Kept.FIRST, Kept.ENDS):
            found = _wider(layers, found, indices, keeps_last=self.forward is Kept.ENDS)
        is_sure = all(_are_between_alike(layers, run, indices) for run in found.runs)
        return found if is_sure else _folding(layers, prefix, indices, self.margin + 1)


@dataclass(frozen=True)
class _Folding:
    """The changes that fold one list. Nodes are given by their place in the graph."""

    prefix: str
    runs: tuple[Run, ...] = ()
    removed: tuple[tuple[int, int], ...] = ()  # node, representative
    rewired: tuple[tuple[int, int, int], ...] = ()  # a kept user, its old operand, its new operand
    declined: tuple[tuple[Node, str], ...] = ()  # the reasons why runs of equal layers are not folded


def _folding(
    layers: Layers, prefix: str, indices: tuple[int, ...], margin: int, *, keeps_last: bool = True
) -> _Folding:
    """Return the folding of a list that removes most nodes."""
    best = _Folding(prefix)
    for period in range(1, MAX_PERIOD + 1):
        kept = len(indices) - sum(len(run.removed) for run in best.runs)
        if kept <= (2 if keeps_last else 1) * period + 2:  # the fewest layers that a longer period would keep
            break
        found = _Folding(prefix)
        signatures = layers.signatures(prefix, indices, period)
        for run in _runs(prefix, indices, signatures, period, margin, keeps_last=keeps_last):
            found = _joined(found, _one_run(layers, run, keeps_last=keeps_last))
        if len(found.removed) > len(best.removed) or not best.runs:
            best = replace(found, declined=found.declined if found.runs else best.declined + found.declined)
    return best


def _wider(layers: Layers, folding: _Folding, indices: tuple[int, ...], *, keeps_last: bool) -> _Folding:
    """Return a folding that removes whole runs where the layers before and after them are equal to them inside; without
    `keeps_last`, it removes the layer after a run, too.
    """
    found = _Folding(folding.prefix, declined=folding.declined)
    for run in folding.runs:
        start = indices.index(run.below[0])
        before, ways = indices[max(start - 1, 0) : start], list[Run]()
        if run.period == len(before) and layers.are_alike_inside(run.prefix, (*before, *run.below, *run.above)):
            ends = replace(run, below=before, removed=run.below + run.removed, is_wide=True)
            ways = [ends] if keeps_last else [replace(ends, removed=ends.removed + ends.above, above=()), ends]
        tried = (_one_run(layers, way, keeps_last=False) for way in ways if _are_between_alike(layers, way, indices))
        one = next((one for one in tried if one.runs), None)
        found = _joined(found, one or _one_run(layers, run, keeps_last=False))
    return found


def _are_between_alike(layers: Layers, run: Run, indices: tuple[int, ...]) -> bool:
    """Return whether calls of no module that belong to the layers next to the kept ones are those of the removed ones."""
    start = indices.index(run.below[0])
    before = zip(indices[max(start - 1, 0) : start], run.below[-1:], strict=False)
    pairs = (*before, *zip(run.above, run.below, strict=False))
    return all(layers.between(run.prefix, one) == layers.between(run.prefix, other) for one, other in pairs)


def _runs(
    prefix: str, indices: tuple[int, ...], signatures: list[int], period: int, margin: int, *, keeps_last: bool
) -> Iterator[Run]:
    """Yield the longest runs of layers that equal the one a period away, if at least a period of them can be
    removed."""
    start = 0
    while start + 2 * period < len(indices):
        end = start + period  # one past the last layer
        while end < len(indices) and signatures[end] == signatures[end - period]:
            end += 1
        first, is_followed = start + margin, end + period <= len(indices)
        kept = period if is_followed and not keeps_last else 2 * period
        count = (end - margin - first) // period * period - kept
        if count > 0:
            cuts = first + period, first + period + count
            above = indices[cuts[1] : cuts[1] + period]
            yield Run(prefix, indices[first : cuts[0]], indices[cuts[0] : cuts[1]], above)
            start = end
        else:
            start += 1


def _one_run(layers: Layers, run: Run, *, keeps_last: bool) -> _Folding:
    """Return the folding of one run, or the reason to decline it."""
    graph = layers.graph
    origin = {}  # removed node -> its layer's number among the removed ones, its own number in the layer
    for number, index in enumerate(run.removed):
        for order, node in enumerate(layers.members[run.prefix, index]):
            origin[node] = number, order
    rewired = []
    for node, (number, order) in origin.items():
        for user in graph.users[node]:
            if user in origin:
                continue
            layer = _substitute(run, number, layers.layer[user], keeps_last=keeps_last)
            new = layers.members[layer][order] if layer is not None else user
            if new >= user:
                return _declined(run, graph.nodes[node], f"%{graph.nodes[user].name} uses a value of it")
            rewired.append((user, node, new))
    for output, value in graph.outputs:
        if value in origin and not _is_removed(run, output):
            assert value is not None
            return _declined(run, graph.nodes[value], f"the {output.role.value} {output.name!r} is a value of it")
    kept = [layers.members[run.prefix, index] for index in run.below]
    removed = tuple((node, kept[number % run.period][order]) for node, (number, order) in origin.items())
    return _Folding(run.prefix, (run,), removed, tuple(rewired))


def _substitute(run: Run, number: int, user: Layer | None, *, keeps_last: bool) -> Layer | None:
    """Return the layer whose value replaces that of removed layer `number` in `user`, None if there is none."""
    if user is None or user[0] != run.prefix:
        is_last = not run.above and number >= len(run.removed) - run.period
        return (run.prefix, run.below[number % run.period]) if is_last else None
    if user[1] in run.above and len(run.removed) + run.above.index(user[1]) - number <= run.period:
        return run.prefix, run.below[number % run.period]
    if keeps_last and user[1] in run.below and number <= run.below.index(user[1]):
        return run.prefix, run.above[number % run.period]
    return None


def _is_removed(run: Run, output: Output) -> bool:
    """Return whether a result is removed with its layer."""
    return output.role is not OutputRole.OUTPUT and index_in(run.prefix, output.name) in run.removed


def _declined(run: Run, node: Node, why: str) -> _Folding:
    text = f"{run.prefix}.{run.removed[0]} to {run.prefix}.{run.removed[-1]} are planned one by one, though equal: {why}"
    return _Folding(run.prefix, declined=((node, text),))


def _joined(one: _Folding, other: _Folding) -> _Folding:
    return _Folding(
        one.prefix,
        one.runs + other.runs,
        one.removed + other.removed,
        one.rewired + other.rewired,
        one.declined + other.declined,
    )


def _chosen(foldings: list[_Folding]) -> list[_Folding]:
    """Return the foldings that remove most: of a list, or of the lists inside of its layers."""
    chosen: list[_Folding] = []
    for folding in reversed([folding for folding in foldings if folding.runs]):  # innermost first
        inside = [one for one in chosen if index_in(folding.prefix, one.prefix) is not None]
        if sum(len(one.removed) for one in inside) <= len(folding.removed):
            chosen = [one for one in chosen if one not in inside] + [folding]
    return chosen[::-1]


def _apply(gm: GraphModule, graph: Indexed, foldings: list[_Folding]) -> None:
    removed = dict(pair for folding in foldings for pair in folding.removed)
    runs = tuple(run for folding in foldings for run in folding.runs)
    calls, parameters = {}, {}
    for place, kept in removed.items():
        old, new = graph.nodes[place], graph.nodes[kept]
        calls[old.name] = new.name
        if old.op == "placeholder":
            parameters[input_of(old).name] = input_of(new).name
    for user, old_place, new_place in (one for folding in foldings for one in folding.rewired):
        graph.nodes[user].replace_input_with(graph.nodes[old_place], graph.nodes[new_place])
    ends = zip(outputs_of(gm.graph), returned(gm.graph), strict=True)
    left = [(output, value) for output, value in ends if not any(_is_removed(run, output) for run in runs)]
    output_node(gm.graph).args = (tuple(value for _, value in left),)
    set_outputs(gm.graph, tuple(output for output, _ in left))
    for place in sorted(removed, reverse=True):
        gm.graph.erase_node(graph.nodes[place])
    calls |= {node.name: node.name for node in gm.graph.nodes if node.op != "output"}
    set_repeats(gm, Repeats(runs, calls, parameters))
