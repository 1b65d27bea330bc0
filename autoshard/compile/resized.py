"""Partition and order a program as an earlier one, if their graphs differ in sizes only.

The order and the buckets were chosen for the earlier sizes, and are kept. What is not: every call of the earlier halves
must be a call of the earlier LOCAL graph, by name, so that it takes its arguments and its value from the call of that name
in the new graph. Two things were decided by comparing calls, and may not hold for other sizes: equal calls are one, and
calls that move data were added for buckets. The former are compared again, and the latter may read only values that are as
they were. Anything else, and the new program is partitioned by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autoshard.compile.compiled import Split, partitioner_names
from passes._torch import fake_mode_of, module_of
from passes.ir.fake_calls import fake_call
from passes.ir.graph import (
    InputRole,
    add_like,
    facts_of,
    input_of,
    is_random,
    outputs_of,
    placeholders,
    results_of,
    returned,
    set_value,
    value_of,
)

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# Calls of a bucket: their arguments follow from the sizes of the values that they read.
_MOVES = (
    *(aten.cat.default, aten.view.default, aten.slice.Tensor, aten.clone.default, c10d.wait_tensor.default),
    *(c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_reduce.default),
)


class _Unlike(Exception):
    """The graphs differ in more than sizes, or the earlier halves do not fit the new sizes."""


def resized(split: Split, before: GraphModule, now: GraphModule) -> Split | None:
    """Return the partition of `now` like `split`, that of `before`; None where that is not surely right.

    `before` and `now` are LOCAL graphs before partitioning.
    """
    count, ends = len(split.outputs), returned(before.graph)
    try:
        sizes, backward = _Sizes(partitioner_names(before), _pairs(before, now)), None
        forward = sizes.half(split.forward, ends[:count])
        if split.backward is not None:
            kept = zip(returned(split.forward.graph)[count:], returned(forward.graph)[count:], strict=True)
            saved = [(one, value_of(other)) for one, other in kept if isinstance(one, Node) and isinstance(other, Node)]
            backward = sizes.half(split.backward, ends[count:], saved)
    except _Unlike:
        return None
    given = placeholders(now.graph)
    tangents = [node for node in given if input_of(node).role is InputRole.TANGENT]
    return replace(
        split,
        forward=forward,
        backward=backward,
        input_values=tuple(value_of(node) for node in given if node not in tangents),
        tangent_values=() if backward is None else tuple(value_of(node) for node in tangents),
    )


def _pairs(before: GraphModule, now: GraphModule) -> dict[Node, Node]:
    """Return the node of `now` for each of `before`. Raises _Unlike if the graphs differ in more than sizes."""
    old, new = list(before.graph.nodes), list(now.graph.nodes)
    if len(old) != len(new) or outputs_of(before.graph) != outputs_of(now.graph):
        raise _Unlike
    if not all(map(_is_alike, old, new)):
        raise _Unlike
    return {one: other for one, other in zip(old, new, strict=True) if one.op != "output"}


def _is_alike(one: Node, other: Node) -> bool:
    """Return whether two nodes are alike in what a partition depends on, but for sizes."""
    return (
        (one.name, one.op, one.op == "call_function" and one.target)
        == (other.name, other.op, other.op == "call_function" and other.target)
        and _are_alike(one.args, other.args)
        and _are_alike(one.kwargs, other.kwargs)
        and (one.op == "output" or _kinds(one) == _kinds(other))
    )


def _kinds(node: Node) -> Any:
    facts = facts_of(node)
    tensors = [(tensor.dtype, tensor.ndim) for tensor in results_of(node)]
    return tensors, facts.input, facts.transfer, facts.recompute, facts.saving, facts.region


def _are_alike(own: object, now: object) -> bool:
    """Return whether arguments are alike: nodes by their names, numbers by their types only."""
    if type(own) is not type(now):
        return False
    if isinstance(own, Node) and isinstance(now, Node):
        return own.name == now.name
    if isinstance(own, tuple | list) and isinstance(now, tuple | list):
        return len(own) == len(now) and all(map(_are_alike, own, now))
    if isinstance(own, dict) and isinstance(now, dict):
        return list(own) == list(now) and all(_are_alike(item, now[name]) for name, item in own.items())
    return type(own) in (int, float) or bool(own == now)


class _Sizes:
    """The earlier halves with the sizes of a new graph, while they are made.

    `named` are the nodes of the earlier graph by the names that the halves have for them, `pairs` those of the new graph
    by those of the earlier one.
    """

    def __init__(self, named: Mapping[str, Node], pairs: Mapping[Node, Node]) -> None:
        self.named, self.pairs = named, pairs
        values = [value_of(node) for node in pairs.values() if node.op == "placeholder"]
        self.mode = fake_mode_of([value for value in values if isinstance(value, torch.Tensor)])
        self.number = _numbers(pairs.values())
        self.sources: dict[Node, Node | None] = {}  # the node of the earlier graph that one of a half is; None: added
        self.present: set[Node] = set()  # the nodes of the earlier graph that the halves have
        self.staying: set[Node] = set()  # other nodes of it that are known to be computed as they were

    def half(self, gm: GraphModule, ends: Sequence[Any], saved: Sequence[tuple[Node, Any]] = ()) -> GraphModule:
        """Return a half with new sizes.

        `ends` are what it returns first, in the earlier graph. A backward takes first what is `saved`: the nodes of the
        earlier forward, and their new values.
        """
        graph, copies, inputs = Graph(), dict[Node, Node](), iter(saved)
        for node in gm.graph.nodes:
            new = copies[node] = add_like(graph, node)
            if node.op == "call_function":
                self._resize(node, new, copies)
                continue
            new.args = map_arg(node.args, copies.__getitem__)
            if node.op == "placeholder":
                kept, value = next(inputs, (None, None))
                source = self.named[node.name] if kept is None else self.sources[kept]
                self._note(node, source)
                set_value(new, value if source is None else value_of(self.pairs[source]))
        for own, before in zip(returned(gm.graph), ends, strict=False):
            if own is not None or before is not None:
                self._check_is(own, before)
        made = module_of(graph, gm)
        made.meta = dict(gm.meta)
        return made

    def _resize(self, node: Node, new: Node, copies: Mapping[Node, Node]) -> None:
        """Give `new`, a copy of `node`, the arguments and the value that it has in the new graph."""
        source = self.named.get(node.name)
        try:
            if source is None or node.target is not source.target or _type(value_of(node)) != _type(value_of(source)):
                raise _Unlike
            now = self.pairs[source]
            args = self._argument(node.args, source.args, now.args)
            kwargs = self._argument(node.kwargs, source.kwargs, now.kwargs)
        except _Unlike:  # its name may also be that of a call that is not in this half
            self._note(node, None)
            _set_arguments(new, node.args, node.kwargs, copies)
            set_value(new, self._moved(node, new))
            return
        self._note(node, source)
        _set_arguments(new, args, kwargs, copies)
        set_value(new, value_of(now))

    def _note(self, node: Node, source: Node | None) -> None:
        self.sources[node] = source
        if source is not None:
            self.present.add(source)

    def _moved(self, node: Node, new: Node) -> Any:
        """Return the value of an added call."""
        before, after = node.all_input_nodes, new.all_input_nodes
        is_as_before = all(
            _type(value_of(one)) == _type(value_of(other)) for one, other in zip(before, after, strict=True)
        )
        if node.target not in _MOVES or not before or not is_as_before:
            raise _Unlike
        return fake_call(self.mode, new.target, new.args, new.kwargs)

    def _argument(self, own: Any, before: Any, now: Any) -> Any:
        """Return an argument of a call in a half: its own nodes, and the constants of the new graph."""
        if isinstance(own, Node):
            self._check_is(own, before)
            return own
        if isinstance(own, tuple | list) and isinstance(before, tuple | list) and len(own) == len(before) == len(now):
            return type(own)([self._argument(*items) for items in zip(own, before, now, strict=True)])
        if isinstance(own, dict) and isinstance(before, dict) and own.keys() == before.keys():
            return {name: self._argument(item, before[name], now[name]) for name, item in own.items()}
        if type(own) is not type(before) or own != before:
            raise _Unlike
        return now

    def _check_is(self, own: Any, before: Any) -> None:
        """Check that a node of a half gives, for the new sizes too, what `before` gives in the whole graph."""
        if not isinstance(own, Node) or not isinstance(before, Node):
            raise _Unlike
        source = self.sources[own]
        if source is None:
            self._check_stays(before)
        elif self.number[self.pairs[source]] != self.number[self.pairs[before]]:
            raise _Unlike

    def _check_stays(self, node: Node) -> None:
        """Check that a value of the earlier graph, which added calls give in a half, is computed as it was from values
        that the half has.
        """
        queue = [node]
        while queue:
            node = queue.pop()
            if node in self.staying:
                continue
            now = self.pairs[node]
            if _type(value_of(node)) != _type(value_of(now)) or _constants(node) != _constants(now):
                raise _Unlike
            self.staying.add(node)
            for source in node.all_input_nodes:
                if source not in self.present or _type(value_of(source)) != _type(value_of(self.pairs[source])):
                    queue.append(source)


def _set_arguments(new: Node, args: Any, kwargs: Any, copies: Mapping[Node, Node]) -> None:
    """Give a node arguments, with copies for the nodes in them."""
    new.args = map_arg(args, copies.__getitem__)
    if kwargs:
        new.kwargs = map_arg(kwargs, copies.__getitem__)


def _numbers(nodes: Iterable[Node]) -> dict[Node, int]:
    """Return a number for each node; two have the same if they are equal calls that draw nothing."""
    numbers: dict[Node, int] = {}
    known: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        form = (node.target, _form((node.args, node.kwargs), lambda one: numbers[one]))
        is_its_own = node.op != "call_function" or is_random(node)
        numbers[node] = number if is_its_own else known.setdefault(form, number)
    return numbers


def _form(value: Any, named: Callable[[Node], Any]) -> Any:
    """Return arguments to compare, with nodes as `named` says."""
    if isinstance(value, Node):
        return named(value)
    if isinstance(value, tuple | list):
        return tuple([_form(item, named) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _form(item, named)) for name, item in value.items()])
    return type(value), str(value) if isinstance(value, float) else value


def _constants(node: Node) -> Any:
    return _form((node.args, node.kwargs), lambda one: None)


def _type(value: Any) -> Any:
    """Return all of a value but its memory."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_type, value)) if isinstance(value, tuple | list) else (type(value), value)
