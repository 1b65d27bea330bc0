"""Find collectives and the products next to them in a per-device graph, and cut them into chunks of rows.

A chunk is a smaller collective and its part of each product: while one chunk is on the link, another is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload
from passes.ir.graph import (
    note_of,
    operands,
    set_note,
    set_transfer,
    tensor_of,
    transfer_of,
)
from passes.ir.matmul_chunks.row_order import Rows, is_move, rows_gathered, rows_scattered, width_of
from passes.ir.matmul_chunks.writer import Writer

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

SUMS = (aten.add.Tensor, torch.ops.prims.convert_element_type.default)  # ops that work row by row, between product and sum


@dataclass(frozen=True)
class Cut:
    """The numbers of parts into which `before` and `after` of [before, ranks, after] are cut; a chunk is a part of
    both."""

    before: int
    after: int

    @property
    def count(self) -> int:
        return self.before * self.after


@dataclass(frozen=True)
class Site:
    """A collective, the products that read its result or compute its operand, and the rows that it moves.

    `joined` holds all rows in order, whatever its shape: the result of a gather, or the operand of a reduction before
    its rows are divided. As an all-reduce does not divide them, any run of rows can be a chunk of it. `kept` says
    whether anything but the products reads the gathered value.
    """

    collective: Node
    joined: Node
    products: tuple[Node, ...]
    rows: Rows
    kept: bool = False

    @property
    def is_gather(self) -> bool:
        return self.collective.target is c10d.all_gather_into_tensor.default

    @property
    def form(self) -> tuple[object, ...]:
        """Return a key that is equal for sites that are cut alike at the same cost."""
        sources = [(tuple(tensor_of(o).shape), tensor_of(o).stride()) for p in self.products for o in operands(p)]
        value = tensor_of(self.collective)
        return self.is_gather, self.rows, self.kept, value.dtype, self.collective.args[1:], tuple(sources)

    def cut(self, count: int) -> Cut | None:
        """Return how to make `count` chunks, of whole runs of rows if there are enough; None if rows do not divide."""
        before = math.gcd(self.rows.before, count)
        after = count // before
        return Cut(before, after) if self.rows.after % after == 0 else None


def sites_in(gm: GraphModule) -> list[Site]:
    """Return gathers that products read row by row, and reductions of products, in program order."""
    found: list[Site] = []
    for node in gm.graph.nodes:
        if transfer_of(node) is None or len(node.users) != 1:
            continue
        if node.target is c10d.all_gather_into_tensor.default:
            found += _gather(node)
        elif node.target in (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default):
            found += _reduction(node)
    return [site for site in found if not _is_empty(site)]


def _is_empty(site: Site) -> bool:
    """Return whether a product has nothing to compute, as those of an empty batch."""
    return not all(tensor_of(operand).numel() for product in site.products for operand in operands(product))


def _gather(node: Node) -> list[Site]:
    wait = next(iter(node.users))
    joined, moves, is_shared = wait, list[Node](), False
    while (move := _next_move(joined, only_views=is_shared or len(joined.users) > 1)) is not None:
        is_shared |= len(joined.users) > 1
        joined = move
        moves.append(move)
    rows = rows_gathered(wait, moves, _ranks(node)) if width_of(wait) == width_of(joined) else None
    if rows is None:
        return []
    products = [user for user in joined.users if _reads_rows(user, joined)]
    kept = is_shared or len(products) < len(joined.users)
    return [Site(node, joined, tuple(products), rows, kept)] if products else []


def _next_move(value: Node, *, only_views: bool) -> Node | None:
    """Return the one move, or with `only_views` the one view, that reads a value on the way to products; None if products read
    the value itself, or if there is no such move."""
    if any(_reads_rows(user, value) for user in value.users):
        return None
    found = [user for user in value.users if (user.target is aten.view.default if only_views else is_move(user))]
    return found[0] if len(found) == 1 else None


def _reads_rows(user: Node, joined: Node) -> bool:
    return user.target is aten.mm.default and user.args[0] is joined and user.args[1] is not joined


def _reduction(node: Node) -> list[Site]:
    total, moves = operands(node)[0], list[Node]()
    while is_move(total) and len(total.users) == 1:
        moves.insert(0, total)
        total = operands(total)[0]
    products = _terms(total)
    if not products:
        return []
    is_whole = node.target is c10d.all_reduce.default
    rows = Rows(math.prod(_shape(total)[:-1]), 1, 1) if is_whole else rows_scattered(total, moves, _ranks(node))
    return [Site(node, total, tuple(products), rows)] if rows is not None and not (is_whole and moves) else []


def _terms(total: Node) -> list[Node]:
    """Return the products whose sum, perhaps cast and viewed, is `total`; none if it depends on anything else."""
    if len(total.users) > 1:
        return []
    if total.target is aten.mm.default:
        return [total]
    if total.target is aten.view.default:
        source = operands(total)[0]
        return _terms(source) if width_of(source) == width_of(total) else []
    if total.target not in SUMS or any(_shape(source) != _shape(total) for source in operands(total)):
        return []
    parts = [_terms(source) for source in operands(total)]
    return [product for part in parts for product in part] if all(parts) else []


def _shape(node: Node) -> torch.Size:
    return tensor_of(node).shape


def _ranks(node: Node) -> int:
    ranks = node.args[-2]
    assert isinstance(ranks, int)
    return ranks


def read_joined(site: Site) -> None:
    """Let all that reads a gathered value before `joined`, as the backward may, read views of `joined`, in place."""
    if not site.is_gather:
        return
    values = [site.joined]
    while operands(values[0])[0] is not site.collective:
        values.insert(0, operands(values[0])[0])
    while len(values) > 1 and len(values[0].users) == 1:
        del values[0]
    for value, view in pairwise(values):
        value.append(view)  # before the other readers
    writer = Writer(site.joined)
    writer.before = site.joined.next
    for value, view in pairwise(values):
        if len(value.users) > 1:
            writer.read_instead(value, site.joined, but=view)


def split(site: Site, cut: Cut, by: str) -> None:
    """Cut a site into chunks, in place; `by` is the pass that does it."""
    read_joined(site)
    chunks = _Chunks(site, cut, by)
    if site.is_gather:
        chunks.gather()
    else:
        chunks.reduction()


class _Chunks(Writer):
    """Adds the chunks of a site."""

    def __init__(self, site: Site, cut: Cut, by: str) -> None:
        super().__init__(site.collective)
        self.site, self.cut, self.by = site, cut, by
        rows = site.rows
        self.part = Rows(rows.before // cut.before, rows.ranks, rows.after // cut.after)

    def gather(self) -> None:
        site, part = self.site, self.part
        (value,) = operands(site.collective)
        width = width_of(value)
        local = self.view(value, [-1, width])
        pieces = [self.rows_of(local, 1, number) for number in range(self.cut.count)]
        waits = [self.wait(self.collective(piece, number)) for number, piece in enumerate(pieces)]
        order = [1, 0, 2, 3]
        if self.moves_gathered():
            waits = [self.view(self.by_run(wait, part, order), [-1, width]) for wait in waits]
            order = [0, 1, 2, 3]
        for product in site.products:
            self.before = self.facts = product
            parts = [self.call(aten.mm.default, wait, product.args[1]) for wait in waits]
            self.replace(product, self.joined(parts, part, order))
        if site.kept:
            self.before = self.facts = site.joined
            self.replace(site.joined, self.joined(waits, part, order))
        self.erase(site.joined)

    def moves_gathered(self) -> bool:
        """Return whether the rows of a gathered chunk are brought in order before the products read them, rather than those of
        each product: if they are no wider than the results."""
        site, part = self.site, self.part
        if self.cut.after > 1 or 1 in (part.before, part.ranks):
            return False
        return width_of(site.joined) <= sum(map(width_of, site.products))

    def reduction(self) -> None:
        site, part = self.site, self.part
        wait = next(iter(site.collective.users))
        local = Rows(part.before, 1, part.after)
        waits = []
        for number in range(self.cut.count):
            rows = self.view(self.chunk(site.joined, number), [part.before, part.ranks, part.after, -1])
            parted = self.contiguous(self.call(aten.permute.default, rows, [1, 0, 2, 3]))
            flat = self.view(parted, [part.ranks, -1])
            waits.append(self.wait(self.collective(flat, number)))
        self.facts = wait
        self.before = wait
        self.replace(wait, self.joined(waits, local, [0, 1, 2, 3]))

    def chunk(self, total: Node, number: int) -> Node:
        """Return the rows of a chunk of `total`, [rows, width], computed from the same rows of its operands."""
        self.facts = total
        if total.target is aten.mm.default:
            left, right = operands(total)
            result = self.call(aten.mm.default, self.rows_of(left, self.site.rows.ranks, number), right)
        elif total.target is aten.view.default:
            result = self.chunk(operands(total)[0], number)
        else:
            sources = [self.chunk(source, number) for source in operands(total)]
            rest = total.args[len(sources) :]
            self.facts = total
            result = self.call(_op_of(total), *sources, *rest, **total.kwargs)
        self.facts = self.site.collective
        return result

    def rows_of(self, value: Node, ranks: int, number: int) -> Node:
        """Return the rows of a chunk of `value`, which has those of `ranks` ranks."""
        before, after = divmod(number, self.cut.after)
        if self.cut.after == 1 or (ranks == 1 and self.part.before == 1):
            return self.piece(value, 0, tensor_of(value).shape[0] // self.cut.count, number)
        value, width = self.view(value, [self.site.rows.before, ranks, self.site.rows.after, -1]), width_of(value)
        piece = self.piece(self.piece(value, 0, self.part.before, before), 2, self.part.after, after)
        return self.view(piece, [-1, width])

    def piece(self, value: Node, dim: int, size: int, number: int) -> Node:
        if size == tensor_of(value).shape[dim]:
            return value
        return self.call(aten.slice.Tensor, value, dim, number * size, (number + 1) * size)

    def collective(self, value: Node, number: int) -> Node:
        node = self.site.collective
        self.facts = node
        new = self.call(_op_of(node), self.contiguous(value), *node.args[1:])
        transfer = transfer_of(node)
        assert transfer is not None
        set_transfer(new, transfer)
        reason = ", ".join(filter(None, (f"part {number + 1} of {self.cut.count}", note_of(node))))
        set_note(new, f"{self.by}: {reason}")
        return new

    def wait(self, node: Node) -> Node:
        return self.call(c10d.wait_tensor.default, node)

    def joined(self, parts: Sequence[Node], rows: Rows, order: Sequence[int]) -> Node:
        """Concatenate chunks, each with its rows in the `order` of [before, ranks, after], in that order.

        Products that make runs of whole rows, not seen through a view, can write them where they belong: Inductor then copies
        nothing.
        """
        if _is_trivial(rows, order) and (self.cut.after == 1 or rows.before == rows.ranks == 1):
            width = tensor_of(parts[0]).numel() // rows.count
            return self.call(aten.cat.default, [self.view(part, [-1, width]) for part in parts], 0)
        split = [self.by_run(part, rows, order) for part in parts]
        runs = [split[start : start + self.cut.after] for start in range(0, len(split), self.cut.after)]
        whole = [self.call(aten.cat.default, run, 2) if len(run) > 1 else run[0] for run in runs]
        return self.call(aten.cat.default, whole, 0) if len(whole) > 1 else whole[0]

    def by_run(self, value: Node, rows: Rows, order: Sequence[int]) -> Node:
        """Return rows in the `order` of [before, ranks, after] as [before, ranks, after, width]."""
        shape = [rows.before, rows.ranks, rows.after]
        if _is_trivial(rows, order):
            return self.view(value, [*shape, -1])
        return self.call(aten.permute.default, self.view(value, [*(shape[dim] for dim in order[:3]), -1]), order)


def _is_trivial(rows: Rows, order: Sequence[int]) -> bool:
    """Return whether rows in the `order` of [before, ranks, after] are in that order itself."""
    return list(order) == sorted(order) or 1 in (rows.before, rows.ranks)


def _op_of(node: Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    return node.target
