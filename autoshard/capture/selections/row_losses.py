"""Losses of selected rows."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.capture.selections.rows import Rows, clean, is_aligned, known_dim, reduce_rows
from autoshard.capture.selections.selections import Writer, require

_REDUCTIONS = ("none", "mean", "sum")


def pair_loss(node: Node, rows: Mapping[Node, Rows], write: Writer) -> Rows | Node:
    """Compute a loss of pairs of elements without its reduction, and reduce the selected rows."""
    given = _arguments(node)
    name = node.target.__name__  # type: ignore[union-attr]
    require(bool(rows) and is_aligned(node.all_input_nodes, rows))
    require(given.get("weight") is None or name.startswith("binary") or given["reduction"] != "mean")  # a mean by the weights
    return _reduced(node, given, rows, write)


def class_loss(node: Node, rows: Mapping[Node, Rows], write: Writer) -> Rows | Node:
    """Compute a loss of scores and classes, where the class of rows that are not selected is the one to ignore."""
    given = _arguments(node)
    scores, target = (rows.get(given[name]) for name in ("input", "target"))
    require(scores is not None and target is not None and len(rows) == 2)
    assert scores is not None and target is not None
    require(scores.dim == target.dim == 0 and scores.example.dim() > 1)
    if target.example.is_floating_point():
        require(target.example.shape == scores.example.shape)
        return _reduced(node, given, rows, write)
    require(target.example.dtype == torch.int64 and target.example.dim() == scores.example.dim() - 1)
    given["target"] = target.filled(given["ignore_index"], write)
    given["input"] = scores.node
    loss = write.function(node.target, **given)
    if given["reduction"] != "none":
        return loss
    return clean(loss, scores.selection, known_dim(node.meta["example_value"], loss, scores.selection), write)


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a loss by name, without those that are deprecated."""
    bound = signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    given = dict(bound.arguments)
    require(given.pop("size_average", None) is None and given.pop("reduce", None) is None)
    require(given["reduction"] in (*_REDUCTIONS, "batchmean"))
    return given


def _reduced(node: Node, given: dict[str, Any], rows: Mapping[Node, Rows], write: Writer) -> Rows | Node:
    one, old, kind = next(iter(rows.values())), node.meta["example_value"], given["reduction"]
    right = one.right if "target" not in given or not _has_classes(node) else one.right - 1
    plain = map_arg(given | {"reduction": "none"}, lambda item: rows[item].node if item in rows else item)
    losses = write.function(node.target, **plain)
    if kind == "none":
        return clean(losses, one.selection, known_dim(old, losses, one.selection), write)
    made = clean(losses, one.selection, losses.meta["example_value"].dim() - right, write)
    every = list(range(made.example.dim()))
    if kind != "batchmean":
        return reduce_rows(made, kind, every, old.dtype, write)
    require(made.dim == 0)
    return write.method("div", reduce_rows(made, "sum", every, old.dtype, write), one.selection.count(write))


def _has_classes(node: Node) -> bool:
    """Return whether a loss has no element for each class."""
    return node.target is torch.nn.functional.cross_entropy
