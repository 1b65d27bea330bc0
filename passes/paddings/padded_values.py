"""Add the calls that pad a value, cut its padding off, and write a number over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from passes._torch import FakeTensorMode
from passes.ir.graph import copy_facts, inserting_where_placed, set_note, tensor_of
from passes.ir.padding import CUT_END, PAD_END, Padding
from passes.normal_forms import At

aten = torch.ops.aten
prims = torch.ops.prims

NOTE = "pad: "
_MASK = aten.where.ScalarOther


@dataclass(frozen=True)
class _Mask:
    """A value whose padding is overwritten with `fill`."""

    value: Node
    padding: Padding
    fill: float | int


@dataclass(frozen=True)
class Cut:
    """A value that is `padded` without a padding."""

    value: Node
    padded: Node
    padding: Padding


@dataclass
class PaddedValues:
    """Record what is padded of each value, and the calls that were added; none is added twice.

    `held` has the paddings of a value, and whether they are zero.
    """

    graph: Graph
    fake_mode: FakeTensorMode
    held: dict[Node, dict[Padding, bool]] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    _made: dict[object, Node] = field(default_factory=dict)
    _short: dict[tuple[Node, Padding], Node] = field(default_factory=dict)  # what a padded value was made from

    def of(self, value: Node) -> dict[Padding, bool]:
        return self.held.get(value, {})

    def padded(self, value: Node, padding: Padding, user: Node) -> Node:
        """Return `value` with zeros as padding; it is first padded for `user`."""
        if padding in self.of(value):
            return value
        key = "pad", value, padding
        if key not in self._made:
            self._made[key] = self._resized(value, padding, user if value.op == "placeholder" else value, longer=True)
            self._hold(self._made[key], {**self.of(value), padding: True})
            self._short[self._made[key], padding] = value
        return self._made[key]

    def cut(self, value: Node, padding: Padding) -> Node:
        """Return `value` without a padding."""
        if (short := self._short.get((value, padding))) is not None:
            return short
        key = "cut", value, padding
        if key not in self._made:
            self._made[key] = self._resized(value, padding, value, longer=False)
            self.cuts.append(Cut(self._made[key], value, padding))
            self._hold(self._made[key], {one: zero for one, zero in self.of(value).items() if one != padding})
        return self._made[key]

    def whole(self, value: Node) -> Node:
        """Return `value` without any padding."""
        for padding in self.of(value):
            value = self.cut(value, padding)
        return value

    def masked(self, value: Node, padding: Padding, fill: float | int) -> Node:
        """Return `value` with `fill` as padding."""
        key = _Mask(value, padding, fill)
        if key not in self._made:
            with self._after(value, "mask", value) as at:
                line = [padding.length if dim == padding.dim else 1 for dim in range(tensor_of(value).dim())]
                real = at.call(aten.view.default, self._real(at, padding), line)
                self._made[key] = at.call(_MASK, real, value, fill)
            held = {**self.of(value), padding: fill == 0}
            self._hold(self._made[key], held)
        return self._made[key]

    def share_zeros(self) -> None:
        """Give a value with zeros as padding to all later users of the value, so that there is one of them."""
        for key, masked in self._made.items():
            if isinstance(key, _Mask) and key.fill == 0 and not isinstance(key.fill, bool):
                for user in [user for user in key.value.users if user.target is not _MASK and masked < user]:
                    user.replace_input_with(key.value, masked)

    def _hold(self, value: Node, paddings: dict[Padding, bool]) -> None:
        if paddings:
            self.held[value] = paddings

    def _real(self, at: At, padding: Padding) -> Node:
        """Return which indices of the dim are no padding."""
        device = tensor_of(at.node).device
        number = at.call(
            prims.iota.default, padding.length, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
        )
        if padding.digit.inner > 1:
            number = at.call(aten.div.Tensor_mode, number, padding.digit.inner, rounding_mode="floor")
        if padding.digit.outer > 1:
            number = at.call(aten.remainder.Scalar, number, padding.padded)
        return at.call(aten.lt.Scalar, number, padding.digit.size)

    def _resized(self, value: Node, padding: Padding, origin: Node, *, longer: bool) -> Node:
        """Pad or cut `value`, between views that make the digit a dim of its own."""
        digit, op = padding.digit, PAD_END if longer else CUT_END
        before, after = (digit.size, padding.padded) if longer else (padding.padded, digit.size)
        with self._after(value, "padded" if longer else "without padding", origin) as at:
            if padding.is_whole:
                return at.call(op, value, padding.dim, after)
            shape = list(tensor_of(value).shape)
            front, back = shape[: padding.dim], shape[padding.dim + 1 :]
            split = _view(at, value, [*front, digit.outer, before, digit.inner, *back])
            resized = at.call(op, split, padding.dim + 1, after)
            return at.call(aten.view.default, resized, [*front, digit.outer * after * digit.inner, *back])

    @contextmanager
    def _after(self, value: Node, note: str, origin: Node) -> Iterator[At]:
        """Add calls after `value`, with the place of `origin` in the user's program."""
        with inserting_where_placed(value):
            place = self.graph.call_function(aten.alias.default, (value,))
        copy_facts(origin, place)
        place.meta["val"] = value.meta["val"]
        last = place.prev
        yield At(self.graph, place, self.fake_mode)
        while (last := last.next) is not place:
            set_note(last, f"{NOTE}{note}")
        self.graph.erase_node(place)


def _view(at: At, value: Node, shape: list[int]) -> Node:
    if not tensor_of(value).is_contiguous():
        value = at.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    return at.call(aten.view.default, value, shape)


