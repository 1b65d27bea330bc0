"""Compute what a function makes of selected rows: a rule for each kind of function, which refuses calls that mix rows.

A rule takes a call, and returns the rows that it computes, several, or a value that has no dim of rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.capture.selections import row_functions as listed
from autoshard.capture.selections.rows import Groups, Parts, Rows, clean, is_aligned, known_dim, reduce_rows
from autoshard.capture.selections.selections import Refused, Selection, Writer, is_constant_slice, require

Result = Rows | Parts | Groups | Node


@dataclass(frozen=True)
class RowCall:
    """A call that reads rows, `rows` by operand, or numbers of rows, `lengths`."""

    node: Node
    name: str
    rows: Mapping[Node, Rows]
    lengths: Mapping[Node, Selection]
    write: Writer

    @property
    def first(self) -> Rows:
        """Return the first operand, which has to be rows."""
        operand = self.argument(0)
        require(isinstance(operand, Node) and operand in self.rows)
        return self.rows[operand]

    @property
    def only(self) -> Rows:
        """Return the first operand, which has to be rows and the one operand that is computed."""
        require(self.node.all_input_nodes == [self.argument(0)])
        return self.first

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its place, or one of its names."""
        if place < len(self.node.args):
            return self.node.args[place]
        return next((self.node.kwargs[name] for name in names if name in self.node.kwargs), default)

    def dims(self, place: int, default: Any) -> list[int]:
        """Return the dims that an argument gives. Raises Refused if it gives none."""
        given = self.argument(place, "dim", "axis", "dims", default=default)
        dims = list(given) if isinstance(given, tuple | list) else [given]
        require(bool(dims) and all(type(dim) is int for dim in dims))
        return [dim % self.first.example.dim() for dim in dims]

    def with_all_rows(self, changed: Mapping[Node, Node] | None = None, *, ones: bool = False) -> Rows | Parts:
        """Call the same with all rows. Raises Refused where the result has other dims than with the selected ones.

        `changed` are operands that are given in place of some. `ones` says that rows which are not selected stay ones.
        """
        require(not any(one in self.lengths for one in self.node.all_input_nodes))
        given = {one: rows.node for one, rows in self.rows.items()} | dict(changed or {})
        args, kwargs = map_arg((self.node.args, dict(self.node.kwargs)), lambda one: given.get(one, one))
        return self.result(self.write.like(self.node, args, kwargs), ones=ones)

    def result(self, new: Node, *, ones: bool = False) -> Rows | Parts:
        """Return what `new` computes in place of the call."""
        selection = next(iter(self.rows.values())).selection
        old = self.node.meta["example_value"]
        if isinstance(old, tuple | list):
            return Parts(new, selection)
        dim = known_dim(old, new, selection)
        return Rows(new, dim, selection) if ones else clean(new, selection, dim, self.write)


def read_groups(node: Node, groups: Groups, write: Writer) -> Node:
    """Return the last row of each group. Raises Refused for calls that read others."""
    require(node.target is operator.getitem and isinstance(node.args[1], tuple))
    items: Any = node.args[1]
    require(items[0] == slice(None) and items[1:2] == (-1,) and all(item == slice(None) for item in items[2:]))
    return groups.last(write)


def read_rows(call: RowCall) -> Result:
    """Return what a call of a listed function makes of rows. Raises Refused for other calls."""
    require(bool(call.node.args))
    for names, rule in _RULES:
        if call.name in names:
            return rule(call)
    raise Refused


def _pointwise(call: RowCall) -> Result:
    require(not any(argument is True for argument in call.node.args))
    require(call.name != "where" or len(call.node.args) == 3)
    if any(one in call.lengths for one in call.node.all_input_nodes):
        return _with_count(call)
    require(is_aligned(call.node.all_input_nodes, call.rows))
    return call.with_all_rows()


def _with_count(call: RowCall) -> Node:
    """Compute with the number of rows, as a tensor."""
    node, lengths = call.node, call.lengths
    require(call.name in listed.COUNTED and not call.rows and len(node.args) == 2 and not node.kwargs)
    args = map_arg(node.args, lambda one: lengths[one].count(call.write) if one in lengths else one)
    new = call.write.like(node, args, {})
    old, made = (one.meta["example_value"] for one in (node, new))
    require(isinstance(old, torch.Tensor) and (old.dtype, old.shape) == (made.dtype, made.shape))
    return new


def _relabelled(call: RowCall) -> Result:
    assert call.only
    return call.with_all_rows(ones=True)


def _reshaped(call: RowCall) -> Result:
    """Change the shape before or after the rows; their number may be among the sizes."""
    rows, node, old = call.first, call.node, call.node.meta["example_value"]
    if rows.dim == 0 and old.dim() == rows.example.dim() + 1 and _is_grouped(old.shape, rows.example.shape):
        require(rows.example.is_floating_point())  # there is no NaN among integers
        return Groups(rows, old.shape[0])
    require(all(one is node.args[0] or call.lengths.get(one) is rows.selection for one in node.all_input_nodes))
    args, kwargs = map_arg(
        (node.args, dict(node.kwargs)), lambda one: rows.node if one is node.args[0] else rows.selection.size
    )
    new = call.write.like(node, args, kwargs)
    made = call.result(new, ones=True)
    require(isinstance(made, Rows))
    assert isinstance(made, Rows)
    require(math.prod(made.example.shape[: made.dim]) == math.prod(rows.example.shape[: rows.dim]))
    return made


def _is_grouped(shape: torch.Size, rows: torch.Size) -> bool:
    """Return whether a shape is that of groups of rows, as many as are known, of a size that is not."""
    return type(shape[0]) is int and isinstance(shape[1], torch.SymInt) and shape[2:] == rows[1:]


def _indexed(call: RowCall) -> Result:
    rows = call.only
    require(rows.dim in _whole_dims(call.argument(1), rows.example.dim()))
    return call.with_all_rows(ones=True)


def _whole_dims(index: Any, dims: int) -> list[int]:
    """Return the dims that an index leaves as they are. Raises Refused for an index of tensors."""
    items = index if isinstance(index, tuple | list) else (index,)
    require(all(item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int for item in items))
    require(all(is_constant_slice(item) for item in items if isinstance(item, slice)))
    taken = sum(isinstance(item, slice | int) for item in items)
    every: list[Any] = [item for item in items if item is not None]
    place = every.index(Ellipsis) if Ellipsis in every else len(every)
    every[place : place + 1] = [slice(None)] * (dims - taken)
    return [dim for dim, item in enumerate(every) if item == slice(None)]


def _along(call: RowCall) -> Result:
    """Compute along dims that are not that of the rows."""
    first = call.first
    require(all(one in call.rows for one in call.node.all_input_nodes))
    require(all((one.dim, one.example.shape) == (first.dim, first.example.shape) for one in call.rows.values()))
    require(first.dim not in call.dims(*listed.ALONG[call.name]))
    return call.with_all_rows()


def _total(call: RowCall) -> Result:
    rows = call.only
    given = call.argument(1, "dim", "axis")
    dims = list(range(rows.example.dim())) if given in (None, (), []) else call.dims(1, None)
    if rows.dim not in dims:
        return call.with_all_rows()
    keepdim = call.argument(2, "keepdim", default=False)
    require(isinstance(keepdim, bool) and len(call.node.args) <= 3)
    require({*call.node.kwargs} <= {"dim", "axis", "keepdim", "dtype"})
    return reduce_rows(rows, call.name, dims, call.node.meta["example_value"].dtype, call.write, keepdim=keepdim)


def _product(call: RowCall) -> Result:
    """Multiply each row by one matrix, or by that of the same row."""
    rows, other = call.first, call.argument(1, "weight")
    require(rows.right > 1 and isinstance(other, Node))
    if len(call.rows) == 1:
        require(other.meta["example_value"].dim() <= 2 and other not in call.rows)
    else:
        require(call.name == "matmul" and all((one.dim, one.right) == (rows.dim, rows.right) for one in call.rows.values()))
        require(rows.right > 2 and other in call.rows)
    return call.with_all_rows()


def _normalized(call: RowCall) -> Result:
    rows, shape = call.first, call.argument(1, "normalized_shape")
    require(len(call.rows) == 1 and isinstance(shape, tuple | list) and rows.right > len(shape))
    return call.with_all_rows()


def _embedding(call: RowCall) -> Result:
    """Look rows up; the index of those that are not selected is 0, which is in every table."""
    rows = call.first
    changes_table, counts = call.argument(3, "max_norm"), call.argument(5, "scale_grad_by_freq")
    require(len(call.rows) == 1 and changes_table is None and not counts and not call.argument(6, "sparse"))
    return call.with_all_rows({call.argument(0): rows.filled(0, call.write)})


def _one_hot(call: RowCall) -> Result:
    rows, classes = call.only, call.argument(1, "num_classes", default=-1)
    require(type(classes) is int and classes > 0)
    return call.with_all_rows({call.argument(0): rows.filled(0, call.write)})


def _gather(call: RowCall) -> Result:
    rows, dim, index = call.first, call.argument(1, "dim"), call.argument(2, "index")
    require(isinstance(index, Node) and index in call.rows and index is not call.argument(0) and type(dim) is int)
    indices = call.rows[index]
    require((indices.dim, indices.right) == (rows.dim, rows.right) and dim % rows.example.dim() != rows.dim)
    return call.with_all_rows({index: indices.filled(0, call.write)})


def _not_dropped(call: RowCall) -> Result:
    """Pass rows through a dropout that is off: one that draws numbers would draw others for all rows."""
    require(call.argument(2, "training", default=True) is False or call.argument(1, "p", default=0.5) == 0)
    require(not call.argument(3, "inplace"))
    return call.only


def _joined(call: RowCall) -> Result:
    dim, every = call.argument(1, "dim", default=0), list(call.rows.values())
    require(all(one in call.rows for one in call.node.all_input_nodes) and type(dim) is int)
    require(all((one.dim, one.right) == (every[0].dim, every[0].right) for one in every))
    require(dim % every[0].example.dim() != every[0].dim)
    return call.with_all_rows(ones=True)


_RULES: tuple[tuple[Collection[str], Callable[[RowCall], Result]], ...] = (
    (listed.POINTWISE, _pointwise),
    (listed.RELABELS, _relabelled),
    (listed.SHAPES, _reshaped),
    (listed.SUMS, _total),
    (listed.ALONG, _along),
    (listed.NORMS, _normalized),
    (("getitem",), _indexed),
    (("matmul", "linear"), _product),
    (("embedding",), _embedding),
    (("one_hot",), _one_hot),
    (("gather",), _gather),
    (("dropout",), _not_dropped),
    (("cat",), _joined),
)
