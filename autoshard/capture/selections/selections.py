"""Masks that select rows in a graph of dynamo, and calls that are added to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from passes._torch import fake_mode_of

_KEPT = ("stack_trace", "nn_module_stack")


class Refused(Exception):
    """A selection is read in a way that needs its length, or that no rule knows."""


def require(condition: bool) -> None:
    """Raise Refused unless a rule's condition holds."""
    if not condition:
        raise Refused


@dataclass
class Writer:
    """Adds calls to a graph, before the node `at` and as part of its line of the model; their shapes are known."""

    graph: Graph
    at: Node | None = None

    def function(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """Add a call of a function."""
        return self._add("call_function", target, args, kwargs)

    def method(self, name: str, /, *args: Any, **kwargs: Any) -> Node:
        """Add a call of a method of the first argument."""
        return self._add("call_method", name, args, kwargs)

    def like(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        """Add a call of what `node` calls, with other arguments."""
        return self._add(node.op, node.target, args, dict(kwargs))

    def _add(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        assert self.at is not None
        with self.graph.inserting_before(self.at):
            node = self.graph.create_node(op, target, args, kwargs)
        node.meta |= {key: self.at.meta[key] for key in _KEPT if key in self.at.meta}
        given, named = map_arg((args, kwargs), lambda one: one.meta["example_value"])
        call: Any = getattr(given[0], target) if op == "call_method" else target
        with torch.no_grad(), fake_mode_of([one.meta["example_value"] for one in node.all_input_nodes]):
            try:
                node.meta["example_value"] = call(*(given[1:] if op == "call_method" else given), **named)
            except RuntimeError as error:  # as a shape that fits some numbers of rows only
                raise Refused from error
        return node


@dataclass
class Selection:
    """The elements of a mask of `shape`, in a row: `dropped` says which are not selected, and is a tensor of its own."""

    mask: Node
    shape: tuple[int, ...]
    dropped: Node
    _views: dict[int, Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return int(self.dropped.meta["example_value"].numel())

    def dropped_beside(self, write: Writer, right: int) -> Node:
        """Return `dropped` as a mask of values whose dim of rows is the one at `-right`."""
        if right not in self._views:
            sizes = (self.size, *[1] * (right - 1))
            self._views[right] = self.dropped if right == 1 else write.method("reshape", self.dropped, sizes)
        return self._views[right]

    def count(self, write: Writer) -> Node:
        """Return the number of selected rows, a tensor."""
        return write.method("sum", write.method("logical_not", self.dropped))


@dataclass
class Selections:
    """The selections of a graph: those by the same mask are one."""

    write: Writer
    made: list[Selection] = field(default_factory=list)

    def by(self, mask: Node, shape: tuple[int, ...]) -> Selection:
        """Return the selection by a mask that is broadcast to `shape`."""
        is_written = mask.meta["example_value"]._version != 0  # maybe between two selections
        for one in self.made:
            if one.mask is mask and one.shape == shape and not is_written:
                return one
        wide = mask if tuple(mask.meta["example_value"].shape) == shape else self.write.method("expand", mask, shape)
        flat = wide if len(shape) == 1 else self.write.method("flatten", wide)
        self.made.append(Selection(mask, shape, self.write.method("logical_not", flat)))
        return self.made[-1]


def selecting_index(node: Node) -> tuple[Any, int, Node] | None:
    """Return of `x[..., mask, ...]` the index that leaves the dims of the mask as they are, the first of these in its result,
    and the mask; None if anything else than slices is beside the mask."""
    source: Any = node.args[0]
    index: Any = node.args[1]
    items: list[Any] = list(index) if isinstance(index, tuple | list) else [index]
    masks = [place for place, item in enumerate(items) if isinstance(item, Node)]
    if len(masks) != 1:
        return None
    place, mask = masks[0], items[masks[0]]
    value = mask.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or value.dim() == 0:
        return None
    others = items[:place] + items[place + 1 :]
    if not all(item is Ellipsis or (isinstance(item, slice) and is_constant_slice(item)) for item in others):
        return None
    hidden = source.meta["example_value"].dim() - value.dim() - sum(item is not Ellipsis for item in others)
    items[place : place + 1] = [slice(None)] * value.dim()
    return tuple(items), sum(hidden if item is Ellipsis else 1 for item in items[:place]), mask


def is_constant_slice(item: slice) -> bool:
    """Return whether the numbers of a slice are known."""
    return not any(isinstance(number, Node) for number in (item.start, item.stop, item.step))
