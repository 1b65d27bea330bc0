"""A graph of all layers, given one of a few of them and one of all that differs in sizes only.

Tracing takes time per layer, and equal layers are traced alike: a few of them, in new sizes, tell how the others look in
these. The graph in the earlier sizes says how layers are joined. It is taken only where it covers the small graph: each of
its calls is one of the layer that stands for its own, and reads the same values of that layer and of those before and after.
Where the first and the last layer stand for those between, both have the call, with the same constants and types, and one
reads the same values: the last in the forward, as the first has no layer before it, and the first in the backward. Where
one layer stands for all, it reads from outside of the list what the others read of their neighbours, of the same type.
Constants are those of the small graph, but for the keys of random numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from passes._torch import fake_empty, fake_mode_of, fake_view, module_of, shares_memory
from passes.ir.equal_layers import Layer, layer_in
from passes.ir.folded_layers import Run, index_in, moved_to
from passes.ir.graph import (
    InputRole,
    Output,
    OutputRole,
    Stage,
    add_like,
    draw_of,
    facts_of,
    has_input,
    has_layout,
    has_needs,
    input_of,
    is_random,
    is_recompute,
    layouts_of,
    note_of,
    origin_of,
    outputs_of,
    region_of,
    results_of,
    returned,
    saving_of,
    set_value,
    stage_of,
    transfer_of,
    update_facts,
    value_of,
)

Key = tuple[Any, ...]  # of a node in its layer

_HELD = (InputRole.PARAMETER, InputRole.BUFFER)


class _Unlike(Exception):
    """The graph of all layers does not cover that of a few."""


@dataclass(frozen=True)
class AllLayers:
    """A graph of all layers; `covered` has, for each of its nodes by name, the name of the one of few layers like it."""

    graph: GraphModule
    covered: dict[str, str]


def with_all_layers(few: GraphModule, runs: tuple[Run, ...], before: GraphModule) -> AllLayers | None:
    """Return `few` with the layers that `runs` say it lacks; None where that is not surely right.

    `before` is a graph with all layers, in other sizes; both are CAPTURED, or both LOCAL. The result has its names.
    """
    try:
        cover = _Cover(few, runs, before)
        cover.check_ends()
        return AllLayers(_Joined(cover).graph(), {node.name: found.name for node, found in cover.covered.items()})
    except _Unlike:
        return None


def covered_draws(few: GraphModule, runs: tuple[Run, ...], before: GraphModule) -> list[int] | None:
    """Return the ordinals that the random calls of `few` have in the graph of all layers; None if they are not sure."""
    try:
        cover = _Cover(few, runs, before)
    except _Unlike:
        return None
    ordinals = {node: number for number, node in enumerate(filter(is_random, before.graph.nodes))}
    own = {cover.covered[node]: number for node, number in ordinals.items() if cover.is_own(node)}
    found = [own.get(node) for node in filter(is_random, few.graph.nodes)]
    return None if None in found else [number for number in found if number is not None]


class EarlierLayers:
    """The layers of `before`, a graph with all of them."""

    def __init__(self, before: GraphModule) -> None:
        self.before = before
        self._places: dict[int, _Places] = {}  # by the level of lists

    def are_alike(self, runs: tuple[Run, ...]) -> bool:
        """Return whether the first and the last of the layers that `runs` remove have the calls of the layers that stand for
        them: the same ones, or, if these read other values, some of each.
        """
        level = _level(runs)
        if level is None:
            return False
        places = self._places.get(level) or self._places.setdefault(level, _Places(self.before, level))
        calls = places.calls()
        return all(
            _are_alike(places, calls[run.prefix, one], calls[run.prefix, other], has_more=run.is_wide)
            for run in runs
            for kept in _stand_ins(run)
            for some in {run.removed[: run.period], run.removed[-run.period :]}
            for one, other in zip(some, kept, strict=True)
        )


def _are_alike(places: _Places, own: dict[Key, Node], kept: dict[Key, Node], *, has_more: bool) -> bool:
    """Return whether the calls `own` of a layer are those of a `kept` one, which may have more of them."""
    return (has_more or list(own) == list(kept)) and all(
        key in kept and _kinds(node) == _kinds(kept[key]) and places.read_alike(node, kept[key], next_too=not has_more)
        for key, node in own.items()
    )


def _stand_ins(run: Run) -> tuple[tuple[int, ...], ...]:
    """Return the layers that stand for a period of the removed ones, once or together with others."""
    return (run.below, run.above) if run.is_wide and run.above else (run.below,)


def _level(runs: tuple[Run, ...]) -> int | None:
    """Return the level of the lists that `runs` are of; None if they are not of one level."""
    levels = {sum(map(str.isdecimal, run.prefix.split("."))) for run in runs}
    return levels.pop() if len(levels) == 1 else None


class _Cover:
    """The node of `few` for each of `before`."""

    def __init__(self, few: GraphModule, runs: tuple[Run, ...], before: GraphModule) -> None:
        level = _level(runs)
        if level is None:
            raise _Unlike
        self.few, self.before, self.runs = few, before, runs
        self.there, self.here = _Places(few, level), _Places(before, level)
        self.stand_ins = {
            (run.prefix, index): tuple((run.prefix, kept[number % run.period]) for kept in _stand_ins(run))
            for run in runs
            for number, index in enumerate(run.removed)
        }
        self.of_one = {run.prefix for run in runs if not run.above}  # lists of which one layer stands for all
        self.covered: dict[Node, Node] = {}
        self.others: dict[Node, Node] = {}  # of the second layer that stands for one
        self.shared: set[Node] = set()  # calls in each layer that few layers have once
        self.compared: set[tuple[Node, Node]] = set()
        self._cover()

    def _cover(self) -> None:
        parts: dict[Any, Node] = {}
        own = 0
        for node, (layer, key) in self.here.places.items():
            layers = (None,) if layer is None else self.stand_ins.get(layer, (layer,))
            found, *others = (self.there.nodes.get((one, key)) for one in layers)
            part = _part(node)
            if (found is None or None in others) and part in parts:  # `self.cos[:n]` in each layer, which few layers have once
                found, others = parts[part], []
                self.shared.add(node)
            else:
                own += layer not in self.stand_ins
            if found is None or _kinds(node) != _kinds(found):
                raise _Unlike
            self.covered[node] = found
            for other in others:
                self.others[node] = self._like(found, other)
            parts.setdefault(part, found)
        if not own == len(set(self.covered.values())) == len(self.there.places):
            raise _Unlike

    def _like(self, found: Node, other: Node | None) -> Node:
        """Return `other`, the call of one end that is `found` in the other end, if only what they read may differ."""
        if other is None:
            raise _Unlike
        if (found, other) not in self.compared:
            is_alike = _kinds(found) == _kinds(other) and _type(value_of(found)) == _type(value_of(other))
            if not is_alike or (draw_of(found) is None and _constants(found) != _constants(other)):
                raise _Unlike
            self.compared.add((found, other))
        return other

    def is_own(self, node: Node) -> bool:
        """Return whether a node of the graph of all layers is in that of a few, too."""
        return self.here.places[node] == self.there.places[self.covered[node]]

    def check_ends(self) -> None:
        """Check that results are those of the layers that stand for their own."""
        ends = dict(zip(outputs_of(self.few.graph), returned(self.few.graph), strict=True))
        own = 0
        for output, value in zip(outputs_of(self.before.graph), returned(self.before.graph), strict=True):
            moved = self._moved(output)
            own += moved == [output]
            found = [self.covered.get(value), self.others.get(value)] if len(moved) > 1 else [self.covered.get(value)]
            if any(one not in ends or ends[one] is not end for one, end in zip(moved, found, strict=True)):
                raise _Unlike
        if own != len(ends):
            raise _Unlike

    def _moved(self, output: Output) -> list[Output]:
        """Return the results of the layers that stand for that of a result."""
        if output.role not in (OutputRole.GRADIENT, OutputRole.BUFFER):
            return [output]
        for run in self.runs:
            index = index_in(run.prefix, output.name)
            if index is not None and (run.prefix, index) in self.stand_ins:
                own = self.stand_ins[run.prefix, index]
                return [Output(output.role, moved_to(run.prefix, number, output.name)) for _, number in own]
        return [output]

    def is_read_alike(self, node: Node, found: Node, own: Node, now: Node) -> bool:
        """Return whether `node` reads from its layer, or as many layers away, what `found` reads from there."""
        covered = self.covered[own]
        (source, key), (other, key_now) = self.here.places[own], self.there.places[now]
        layer, stand_in = self.here.places[node][0], self.there.places[found][0]
        is_by_ends = own in self.others or (source is not None and node in self.others)  # so that only the distance tells
        if covered is now and (own in self.shared or not is_by_ends):
            return True
        if _type(value_of(covered)) != _type(value_of(now)):
            return False
        if layer and source and layer[0] in self.of_one:
            is_outside = source[0] == layer[0] and source != layer and other != stand_in
            return is_outside and self._is_placed_alike(covered, now)
        if not (source and other and layer and stand_in) or key != key_now:
            return False
        away, away_now = self.here.distance(layer, source), self.there.distance(stand_in, other)
        return away is not None and away == away_now


    def _is_placed_alike(self, one: Node, other: Node) -> bool:
        """Return whether two nodes of the small graph surely hold the same part of a value, or all of it."""
        if stage_of(self.few) is Stage.CAPTURED:
            return True
        return has_layout(one) and has_layout(other) and layouts_of(one) == layouts_of(other)


class _Joined:
    """The graph of all layers in the new sizes, while it is made."""

    def __init__(self, cover: _Cover) -> None:
        self.cover = cover
        self.copies: dict[Node, Node] = {}  # its nodes by those of the earlier graph

    def graph(self) -> GraphModule:
        """Return the graph. Raises _Unlike where a call reads other values than those that stand for it."""
        cover, graph, copies = self.cover, Graph(), self.copies
        mode = fake_mode_of([value for node in cover.there.places for value in results_of(node)])
        for node in cover.before.graph.nodes:
            new = copies[node] = add_like(graph, node)
            if node.op == "output":
                new.args = map_arg(node.args, copies.__getitem__)
                continue
            found = cover.covered[node]
            if node.op == "placeholder":
                new.args = node.args
            else:
                try:
                    self._set_arguments(new, node, found)
                except _Unlike:
                    if node not in cover.others:
                        raise
                    found = cover.others[node]
                    self._set_arguments(new, node, found)
            facts, like = facts_of(found), self._like(node, found)
            note = facts.note if note_of(like) == note_of(node) else note_of(node)  # it may name sizes, or a parameter
            update_facts(new, layouts=facts.layouts, needs=facts.needs, pins=facts.pins, note=note)
            set_value(new, value_of(found) if cover.is_own(node) else _again(mode, new, found))
        made = module_of(graph, cover.few)
        made.meta = dict(cover.before.meta)
        return made

    def _like(self, node: Node, found: Node) -> Node:
        """Return the node of the earlier graph that is where `found`, which covers `node`, is in that of few layers."""
        return self.cover.here.nodes.get(self.cover.there.places[found], node)

    def _set_arguments(self, new: Node, node: Node, found: Node) -> None:
        """Give `new`, the copy of `node`, the arguments of `found`."""
        pair, like = (node, found), self._like(node, found)
        args = self._argument(pair, node.args, like.args, found.args)
        if node.kwargs or found.kwargs:
            new.kwargs = self._argument(pair, node.kwargs, like.kwargs, found.kwargs)
        new.args = args

    def _argument(self, pair: tuple[Node, Node], own: Any, like: Any, now: Any) -> Any:
        """Return an argument of a node, given that of the one that covers it: copies of its own nodes, and new constants.

        `like` is the argument, in the earlier sizes, of the one that covers it.
        """
        if isinstance(own, Node) or isinstance(now, Node):
            if not isinstance(own, Node) or not isinstance(now, Node):
                raise _Unlike
            is_shared = own is like and self.cover.covered[own] is now  # both layers read the same
            if not is_shared and not self.cover.is_read_alike(*pair, own, now):
                raise _Unlike
            return self.copies[own]
        if type(own) is not type(now) or type(own) is not type(like):
            raise _Unlike
        if isinstance(own, tuple | list):
            if not len(own) == len(like) == len(now):
                raise _Unlike
            return type(own)([self._argument(pair, *items) for items in zip(own, like, now, strict=True)])
        if isinstance(own, dict):
            if not own.keys() == like.keys() == now.keys():
                raise _Unlike
            return {name: self._argument(pair, item, like[name], now[name]) for name, item in own.items()}
        if draw_of(pair[0]) is None or own == like:
            return now
        if like != now:
            raise _Unlike
        return own  # the key of random numbers, which are others in each layer


class _Places:
    """The nodes of a graph by their layers, and by what they are in these."""

    def __init__(self, gm: GraphModule, level: int) -> None:
        self.places: dict[Node, tuple[Layer | None, Key]] = {}
        self.nodes: dict[tuple[Layer | None, Key], Node] = {}
        seen: Counter[Any] = Counter()
        layers = _layers(gm, level)
        for node, (layer, rest) in layers.items():
            what: Key = (rest, _what(node, layer))
            seen[layer, what] += 1
            place = layer, (*what, seen[layer, what])
            self.places[node] = place
            self.nodes[place] = node
        found = sorted({layer for layer, _ in layers.values() if layer is not None})
        self.ranks = {layer: rank for rank, layer in enumerate(found)}

    def calls(self) -> dict[Layer | None, dict[Key, Node]]:
        """Return the nodes of each layer."""
        found: dict[Layer | None, dict[Key, Node]] = defaultdict(dict)
        for node, (layer, key) in self.places.items():
            found[layer][key] = node
        return found

    def read_alike(self, one: Node, other: Node, *, next_too: bool) -> bool:
        """Return whether nodes of two layers read the same values: of their own layers, with `next_too` of the layers around
        these, or of outside.
        """
        sources = one.all_input_nodes, other.all_input_nodes
        return len(sources[0]) == len(sources[1]) and all(
            own is like or self._from(one, own, next_too=next_too) == self._from(other, like, next_too=next_too)
            for own, like in zip(*sources, strict=True)
        )

    def _from(self, node: Node, source: Node, *, next_too: bool) -> tuple[int, Key] | None:
        """Return how many layers away from `node`, and what there, `source` is; None for a value of outside."""
        layer, key = self.places[source]
        own = self.places[node][0]
        away = None if layer is None or own is None else self.distance(own, layer)
        return None if away is None or (away and not next_too) else (away, key)

    def distance(self, one: Layer, other: Layer) -> int | None:
        """Return how many layers after `one` in its list `other` is; None for one of another list."""
        return self.ranks[other] - self.ranks[one] if one[0] == other[0] else None


def _layers(gm: GraphModule, level: int) -> dict[Node, tuple[Layer | None, str]]:
    """Return the layer of each node, and its module inside of the layer ("^" and the module for one not named after it).

    A call of another module, such as one of the backward, belongs to the layer of its latest operand, a constant to the
    layer that reads it.
    """
    found: dict[Node, tuple[Layer | None, str]] = {}
    place: dict[Node, int] = {}
    constants: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        place[node] = len(place)
        fqn = input_of(node).name if has_input(node) and input_of(node).role in _HELD else origin_of(node).fqn
        own = layer_in(fqn, level)
        calls = [source for source in node.all_input_nodes if source.op != "placeholder" and source not in constants]
        latest = found[max(calls, key=place.__getitem__)][0] if calls else None
        inherits = own is None and latest is not None and (not fqn or latest[0].startswith(f"{fqn}."))
        found[node] = own or (latest if inherits else None, f"^{fqn}")
        if node.op == "call_function" and not node.all_input_nodes and own is None:
            constants[node] = None
    for node in constants:
        readers = {found[user][0] if user in found else None for user in node.users}
        found[node] = readers.pop() if len(readers) == 1 else None, found[node][1]
    return found


def _what(node: Node, layer: Layer | None) -> Any:
    if node.op != "placeholder":
        return node.target
    given = input_of(node)
    return given.role if layer else (given.role, given.name)


def _part(node: Node) -> Any:
    """Return what is equal for equal calls that read inputs only; other nodes are only equal to themselves."""
    if node.op == "placeholder" or is_random(node) or not node.all_input_nodes:
        return node
    is_of_inputs = all(source.op == "placeholder" for source in node.all_input_nodes)
    return (node.target, str(node.args), str(node.kwargs)) if is_of_inputs else node


def _kinds(node: Node) -> Any:
    """Return what equal nodes have in common in all sizes."""
    tensors = [(tensor.dtype, tensor.ndim, tensor.device) for tensor in results_of(node)]
    facts = transfer_of(node), is_recompute(node), saving_of(node), has_needs(node), _dims(node)
    return node.op, tensors, region_of(node) is None, has_input(node) and input_of(node).role, facts


def _dims(node: Node) -> Any:
    """Return the dims that the results of a placed node are sharded over, on each axis."""
    layouts = layouts_of(node) if has_layout(node) else ()
    return [[(type(one), getattr(one, "dim", None)) for one in layout.placements] for layout in layouts]


def _constants(value: Node) -> Any:
    """Return the arguments of a node but for the nodes in them."""
    return str(map_arg((value.args, value.kwargs), lambda one: None))


def _type(value: Any) -> Any:
    """Return all of a value but its memory."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_type, value)) if isinstance(value, tuple | list) else (type(value), value)


def _again(mode: Any, node: Node, like: Node) -> Any:
    """Return a value for `node`, as that of `like`: on memory of its own, or on that of the operand which it is a view of."""
    pairs = list(zip(node.all_input_nodes, like.all_input_nodes, strict=True))

    def made(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)([made(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return value
        for own, other in pairs:
            for base, base_like in zip(results_of(own), results_of(other), strict=True):
                if value is base_like:
                    return base
                if shares_memory(value, base_like) and value.dtype is base_like.dtype:
                    return fake_view(mode, base, value.shape, value.stride(), int(value.storage_offset()))
        return fake_empty(mode, value.shape, value.dtype, value.device, value.stride())

    return made(value_of(like))
