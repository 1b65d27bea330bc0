"""Replace a gather and the products that read it, or a product and its reduce-scatter, by one operator.

The operator sends rows of one rank while it multiplies those of another. Its results need no wait.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from passes._torch import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, OpOverload
from passes.ir.graph import note_of, operands, set_note, set_transfer, transfer_of
from passes.ir.matmul_chunks.row_order import width_of
from passes.ir.matmul_chunks.sites import Site, read_joined
from passes.ir.matmul_chunks.writer import Writer

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

OPERATORS = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
_REDUCTIONS = ("sum", "avg")  # reductions that the operator supports


def why_not_one(site: Site) -> str:
    """Return why a site cannot be one operator; empty if it can."""
    if site.is_gather:
        return "" if _products(site) else "its products' other operands come of what is gathered"
    if site.collective.target is not c10d.reduce_scatter_tensor.default:
        return "there is none for an all-reduce"
    if len(site.products) > 1:
        return f"it reduces a sum of {len(site.products)} products"
    total = site.joined
    while total.target is aten.view.default:
        total = operands(total)[0]
    if total is not site.products[0]:
        return "the product is cast before it is reduced"
    return "" if site.collective.args[1] in _REDUCTIONS else f"it reduces by {site.collective.args[1]!r}"


def make_one(site: Site, by: str) -> None:
    """Replace a site by one operator, in place; `by` is the pass that does it."""
    assert not why_not_one(site), why_not_one(site)
    read_joined(site)
    if site.is_gather:
        _One(site, by).gather()
    else:
        _One(site, by).reduction()


def _products(site: Site) -> list[Node]:
    """Return the products of the gathered value with values that do not depend on it, in program order."""
    return sorted(product for product in site.products if _made_behind(operands(product)[1], site) is not None)


def _made_behind(value: Node, site: Site) -> list[Node] | None:
    """Return the calls after the gather that lead to `value`, in program order; None if one reads the gathered
    value."""
    found, queue = set[Node](), [value]
    while queue:
        node = queue.pop()
        if node is site.joined:
            return None
        if node not in found and site.joined < node:
            found.add(node)
            queue += node.all_input_nodes
    return sorted(found)


class _One(Writer):
    """Adds the operator of a site."""

    def __init__(self, site: Site, by: str) -> None:
        super().__init__(site.collective)
        self.site, self.by = site, by

    def gather(self) -> None:
        site, rows = self.site, self.site.rows
        products = _products(site)
        readers = list(site.joined.users)
        keep = len(products) < len(readers)
        others = [operands(product)[1] for product in products]
        first = min(readers)
        for node in sorted({node for other in others for node in _made_behind(other, site) or ()}):
            if first < node:
                first.prepend(node)
        self.before = first
        (value,) = operands(site.collective)
        by_rows = rows.before == 1
        part = self.view(value, [rows.after, -1] if by_rows else [rows.before, rows.after, width_of(site.joined)])
        made = self.operator(ALL_GATHER_MATMUL, part, others, 0 if by_rows else 1, keep)
        if keep:
            self.facts = site.joined
            self.replace(site.joined, self.call(operator.getitem, made, len(products)))
        for number, product in enumerate(products):
            self.before = self.facts = product
            self.replace(product, self.call(operator.getitem, made, number))

    def reduction(self) -> None:
        site, rows = self.site, self.site.rows
        left, right = operands(site.products[0])
        wait = next(iter(site.collective.users))
        by_rows = rows.before == 1
        whole = left if by_rows else self.view(left, [rows.before, rows.ranks * rows.after, -1])
        reduction = site.collective.args[1]
        self.replace(wait, self.operator(MATMUL_REDUCE_SCATTER, whole, right, reduction, 0 if by_rows else 1))

    def operator(self, op: OpOverload, *args: object) -> Node:
        """Return the new call in the place of the collective, with its group."""
        node = self.site.collective
        self.facts = node
        transfer = transfer_of(node)
        assert transfer is not None
        made = self.call(op, *args, *node.args[-2:])
        set_transfer(made, transfer)
        reason = ", ".join(filter(None, (f"one with {_count(self.site)}", note_of(node))))
        set_note(made, f"{self.by}: {reason}")
        return made


def _count(site: Site) -> str:
    count = len(_products(site)) if site.is_gather else 1
    return "its product" if count == 1 else f"{count} products"
