"""Keep all rows where a model selects some by a mask, `x[mask]`, and leave the others out of sums and means.

A graph has fixed shapes, but dynamo traces a selection with a number of rows that it does not know. Here its graph is written
with all rows, where each function that reads them computes row by row, and what adds rows up takes the selected ones alone. A
function is one of a closed list (`row_functions`); where any other one reads a selection, or its length, that is an error.

Rows that are not selected are ones after each function. So none can make a NaN, whatever they held, and as `masked_fill` has no
gradient where it fills, nothing that is computed of them reaches a gradient.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autoshard.capture.capture_errors import check_shape, format_place
from autoshard.capture.origins import user_frame
from autoshard.capture.selections.row_functions import CLASS_LOSSES, LOSSES, name_of_call
from autoshard.capture.selections.row_losses import class_loss, pair_loss
from autoshard.capture.selections.row_rules import RowCall, read_groups, read_rows
from autoshard.capture.selections.rows import Groups, Parts, Rows, clean, known_dim
from autoshard.capture.selections.selections import Refused, Selection, Selections, Writer, require, selecting_index
from passes._torch import CTC_LOSS, MASKED_SELECT, is_known
from passes.errors import CaptureError

aten = torch.ops.aten

_READ = (
    "the model selects rows by a mask (x[mask]), and reads them here by what is not known to compute each row by itself, but the "
    "shapes of a graph are fixed; keep all rows and blank out with torch.where, a product with the mask, or masked_fill"
)


def keep_rows(module: GraphModule) -> tuple[str, ...]:
    """Write the selections of a graph of dynamo, and of those in it, such as that of a checkpoint, with all rows. Return the
    stacks of the lines that select.

    A graph that returns a selection stays as it is. Raises CaptureError where one is read in a way that no rule knows, and for
    another tensor of a shape that is not known.
    """
    parts = [one for one in module.modules() if isinstance(one, GraphModule)]
    return tuple(dict.fromkeys(stack for one in parts for stack in _keep_rows(one)))


def _keep_rows(part: GraphModule) -> list[str]:
    if not any(map(_is_unknown, part.graph.nodes)):
        return []
    before = set(part.graph.nodes)
    keeps = _KeepsRows(part.graph)
    try:
        keeps.run()
    except Refused:
        node = keeps.write.at
        assert node is not None
        if keeps.reads and (stack := node.meta.get("stack_trace")):
            raise CaptureError(_READ + format_place(user_frame(stack))) from None
        check_shape(node)
        for node in reversed(part.graph.nodes):
            if node not in before:
                part.graph.erase_node(node)
        return []
    part.recompile()
    return keeps.stacks


def _is_unknown(node: Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else (value,)
    tensors = (one for one in values if isinstance(one, torch.Tensor))
    return isinstance(value, torch.SymInt) or any(isinstance(size, torch.SymInt) for one in tensors for size in one.shape)


class _KeepsRows:
    """One pass over a graph. New calls stand before the old ones, which are replaced and erased at the end."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.write = graph, Writer(graph)
        self.selections = Selections(self.write)
        self.rows: dict[Node, Rows | Parts | Groups] = {}
        self.lengths: dict[Node, Selection] = {}
        self.alike: list[Node] = []
        self.stacks: list[str] = []
        self.reads = False

    def run(self) -> None:
        """Replace all calls of selections. Raises Refused, with nothing replaced, where that cannot be."""
        old: list[Node] = []
        new: dict[Node, Node] = {}
        for node in list(self.graph.nodes):
            self.write.at = node
            self.reads = reads = any(one in self.rows or one in self.lengths for one in node.all_input_nodes)
            if not reads and not _is_unknown(node):
                continue
            old.append(node)
            if not reads and not node.users and node.target is torch.unique_consecutive:  # which a check read
                require(is_known(node.meta["example_value"].shape[0] <= 1))  # some checks allow several values
                self.alike += [one for one in node.all_input_nodes if one is node.args[0]]
                continue
            result = self._read(node) if reads else self._selected(node)
            if isinstance(result, Node):
                old_value, value = (one.meta["example_value"] for one in (node, result))
                require(_is_unknown(node) or list(old_value.shape) == list(value.shape))
                new[node] = result
            elif isinstance(result, Selection):
                self.lengths[node] = result
            else:
                self.rows[node] = result
        for node, replacement in new.items():
            node.replace_all_uses_with(replacement)
        for node in reversed(old):
            self.graph.erase_node(node)

    def _selected(self, node: Node) -> Rows | Node:
        """Return the rows of a new selection."""
        require(node.target is operator.getitem)
        found = selecting_index(node)
        require(found is not None)
        index, dim, mask = found  # type: ignore[misc]
        shape = tuple(mask.meta["example_value"].shape)
        source: Any = node.args[0]
        if node.users and all(_is_target(node, user) for user in node.users):
            require(source.meta["example_value"].shape == shape)
            return self.write.function(MASKED_SELECT, source, mask)
        self.stacks.append(node.meta.get("stack_trace") or "")
        value = self.write.like(node, (source, index), {})
        flat = self.write.method("flatten", value, dim, dim + len(shape) - 1) if len(shape) > 1 else value
        return self._checked(node, flat, dim, self.selections.by(mask, shape))

    def _checked(self, node: Node, new: Node, dim: int, selection: Selection) -> Rows:
        require(known_dim(node.meta["example_value"], new, selection) == dim)
        return clean(new, selection, dim, self.write)

    def _read(self, node: Node) -> Rows | Parts | Groups | Selection | Node:
        """Return what a call makes of rows, or of their number."""
        source: Any = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if node.target is aten.sym_size.int:
            rows = self.rows.get(source)
            require(isinstance(rows, Rows) and bool(node.args[1] == rows.dim))
            return rows.selection  # type: ignore[union-attr]
        parts = self.rows.get(source)
        if isinstance(parts, Parts):
            require(node.target is operator.getitem and isinstance(node.args[1], int))
            new = self.write.like(node, (parts.node, node.args[1]), {})
            return self._checked(node, new, known_dim(node.meta["example_value"], new, parts.selection), parts.selection)
        if isinstance(parts, Groups):
            return read_groups(node, replace(parts, alike=tuple(self.alike)), self.write)
        operands = {one: self.rows[one] for one in node.all_input_nodes if one in self.rows}
        require(len({id(one.selection) for one in operands.values()}) <= 1)
        rows_of = {one: rows for one, rows in operands.items() if isinstance(rows, Rows)}
        require(len(rows_of) == len(operands))
        if node.op == "call_function" and node.target in LOSSES:
            return pair_loss(node, rows_of, self.write)
        if node.op == "call_function" and node.target in CLASS_LOSSES:
            return class_loss(node, rows_of, self.write)
        name = name_of_call(node)
        require(name is not None)
        return read_rows(RowCall(node, str(name), rows_of, self.lengths, self.write))


def _is_target(selection: Node, user: Node) -> bool:
    """Return whether a selection is read as targets of a CTC loss alone, which knows how many there are."""
    return user.target is CTC_LOSS and [place for place, one in enumerate(user.args) if one is selection] == [1]
