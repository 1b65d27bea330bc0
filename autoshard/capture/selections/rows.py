"""All rows of a value, of which a model selects some: those that it does not select are ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autoshard.capture.selections.selections import Selection, Writer, require

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rows:
    """A value with all rows: `node` has the dim `dim` in place of the selected ones; the others are ones."""

    node: Node
    dim: int
    selection: Selection

    @property
    def example(self) -> torch.Tensor:
        value: torch.Tensor = self.node.meta["example_value"]
        return value

    @property
    def right(self) -> int:
        """Return the place of the dim, counted from the last one, which broadcasting keeps."""
        return self.example.dim() - self.dim

    def filled(self, number: int, write: Writer) -> Node:
        """Return the value with another number than one in the rows that are not selected."""
        return write.method("masked_fill", self.node, self.selection.dropped_beside(write, self.right), number)


@dataclass(frozen=True)
class Parts:
    """Several results of one call, such as those of `chunk`."""

    node: Node
    selection: Selection


@dataclass(frozen=True)
class Groups:
    """The selected rows in `count` groups of as many each, in their order: `x[mask].view(count, -1, size)`.

    `alike` are values of which the model has checked that all their elements are the same.
    """

    rows: Rows
    count: int
    alike: tuple[Node, ...] = ()

    @property
    def selection(self) -> Selection:
        return self.rows.selection

    def last(self, write: Writer) -> Node:
        """Return the last row of each group; NaN where the model would raise an error, as the rows make no such groups."""
        chosen = write.method("logical_not", self.selection.dropped)
        numbers = write.method("cumsum", chosen, 0)  # from 1
        size = write.method("floor_divide", self.selection.count(write), self.count)
        lasts = write.method("mul", write.method("cumsum", write.method("new_ones", numbers, self.count), 0), size)
        is_last = write.method("eq", write.method("unsqueeze", lasts, 1), numbers)
        places = write.method("argmax", write.method("int", write.method("logical_and", is_last, chosen)), 1)
        return write.method("masked_fill", write.method("index_select", self.rows.node, 0, places), self._fail(write), math.nan)

    def _fail(self, write: Writer) -> Node:
        """Return whether there are no rows, the groups do not divide them, or values that were checked differ."""
        count = self.selection.count(write)
        rest = write.method("remainder", count, self.count)
        fail = write.method("logical_or", write.method("ne", rest, 0), write.method("eq", count, 0))
        for one in self.alike:
            unlike = write.method("ne", write.method("amax", one), write.method("amin", one))
            fail = write.method("logical_or", fail, unlike)
        return fail


def clean(node: Node, selection: Selection, dim: int, write: Writer) -> Rows:
    """Return a value as rows, with ones where it is of rows that are not selected."""
    require(node.meta["example_value"].shape[dim] == selection.size)
    return Rows(Rows(node, dim, selection).filled(1, write), dim, selection)


def known_dim(old: torch.Tensor, node: Node, selection: Selection) -> int:
    """Return the dim of the rows in `node`, which computes `old` with all of them. Raises Refused if it does not."""
    new = node.meta["example_value"]
    require(isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.dim() == new.dim())
    unknown = [dim for dim, size in enumerate(old.shape) if isinstance(size, torch.SymInt)]
    require(len(unknown) == 1)
    expected = [selection.size if dim in unknown else size for dim, size in enumerate(old.shape)]
    require(list(new.shape) == expected)
    if new.dtype != old.dtype:  # of a call in autocast
        with torch.no_grad():
            node.meta["example_value"] = new.to(old.dtype)
    return unknown[0]


def is_aligned(values: Sequence[Any], rows: Mapping[Node, Rows]) -> bool:
    """Return whether broadcasting pairs each row with the same row of others, and with values that are the same for all rows."""
    right = next(iter(rows.values())).right
    others = (one.meta.get("example_value") for one in values if one not in rows)
    tensors = [one for one in others if isinstance(one, torch.Tensor)]
    return all(one.right == right for one in rows.values()) and all(
        one.dim() < right or one.shape[-right] == 1 for one in tensors
    )


def reduce_rows(
    rows: Rows, name: str, dims: Sequence[int], dtype: torch.dtype, write: Writer, *, keepdim: bool = False
) -> Node:
    """Return the "sum" or "mean" of the selected rows over dims that the rows' one is among. That of no rows is 0 or NaN."""
    wide = torch.float32 if dtype in _HALF else dtype
    total = write.method("sum", rows.filled(0, write), list(dims), keepdim=keepdim, dtype=wide)
    if name == "mean":
        others = math.prod(rows.example.shape[dim] for dim in dims if dim != rows.dim)
        count = rows.selection.count(write)
        total = write.method("div", total, count if others == 1 else write.method("mul", count, others))
    return total if wide is dtype else write.method("to", total, dtype)
