"""Join collectives of parameters and of gradients, as each message costs latency, whatever its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload, fake_mode_of, fake_view
from passes.base import Pass, PassContext
from passes.cost.program import Program
from passes.cost.scheduling.best_schedule import WORTH, Schedule, bucketed, memory_cap, prefetch, schedule
from passes.cost.scheduling.bucketing import SMALLER, buckets, neighbours, sizes
from passes.cost.simulate import simulate
from passes.ir.collectives import KINDS
from passes.ir.fake_calls import fake_call
from passes.ir.graph import (
    Stage,
    add_call,
    copy_facts,
    copy_graph,
    has_layout,
    is_recompute,
    layouts_of,
    note_of,
    operands,
    output_node,
    set_layouts,
    set_note,
    set_recompute,
    set_transfer,
    set_value,
    tensor_of,
    transfer_of,
    value_of,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

MiB = 1 << 20
BUCKET_BYTES = 400 * MiB  # 16 x 25 MiB, the default of DistributedDataParallel (bucket_cap_mb), which is tried as well


@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Join collectives of parameters and of gradients of a partitioned graph into buckets of at most `limit` bytes.

    1. All-gathers of what is known from the start can start at any time: a bucket takes the place of its first member.
    2. Reduce-scatters and all-reduces whose results are only returned can end at any time: a bucket takes the place of
       its last member.

    Members have the same kind, reduction, group and dtype, are neighbours in the program, and are the same number of
    collectives away from the parameter or the result, so that a bucket never waits for itself. Bytes are of a collective's
    larger side.

    If the hardware is known, only members that are faster together are joined. The size of buckets is chosen per mesh axes
    and dtype: the one for which the graph, scheduled within `memory_limit` (bytes at its peak), is predicted to be fastest.
    It can be none, since a bucket is copied together and apart; of messages that hide, only small ones are joined. The
    bucketed graph is priced again: if it is slower or does not fit, nothing is joined. If the hardware is not known, buckets
    have 1/16 of `limit`. `fused` says whether Inductor joins kernels.

    Before:

        mesh dp=2
        stage LOCAL
        %a: f32[3] {dp:S(0)} = parameter("a")
        %b: f32[2] {dp:S(0)} = parameter("b")
        %all_gather_into_tensor: f32[6] = _c10d_functional.all_gather_into_tensor(%a, 2, "autoshard:dp=2:dp")
        %wait_tensor: f32[6] {dp:R} = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %all_gather_into_tensor_1: f32[4] = _c10d_functional.all_gather_into_tensor(%b, 2, "autoshard:dp=2:dp")
        %wait_tensor_1: f32[4] {dp:R} = _c10d_functional.wait_tensor(%all_gather_into_tensor_1)
        return output("0") %wait_tensor, output("1") %wait_tensor_1

    After:

        mesh dp=2
        stage LOCAL
        %a: f32[3] {dp:S(0)} = parameter("a")
        %b: f32[2] {dp:S(0)} = parameter("b")
        %cat: f32[5] = cat([%a, %b])
        %all_gather_into_tensor_2: f32[10] = _c10d_functional.all_gather_into_tensor(%cat, 2, "autoshard:dp=2:dp")
        %wait_tensor_2: f32[10] = _c10d_functional.wait_tensor(%all_gather_into_tensor_2)
        %view: f32[2, 5] = view(%wait_tensor_2, [2, 5])
        %slice_1: f32[2, 3]<5, 1> = slice.Tensor(%view, 1, 0, 3)
        %clone: f32[2, 3] = clone(%slice_1, memory_format=torch.contiguous_format)
        %slice_2: f32[2, 2]<5, 1> = slice.Tensor(%view, 1, 3, 5)
        %clone_1: f32[2, 2] = clone(%slice_2, memory_format=torch.contiguous_format)
        %view_1: f32[6] {dp:R} = view(%clone, [6])
        %view_2: f32[4] {dp:R} = view(%clone_1, [4])
        return output("0") %view_1, output("1") %view_2
    """

    name: ClassVar[str] = "bucket_collectives"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    limit: int = BUCKET_BYTES
    memory_limit: int | None = None
    fused: bool = True

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        program = ctx.programs.of(gm, ctx.priced(self, gm), fused=self.fused)
        if ctx.mesh.hardware is None:
            joined = tuple(neighbours(program, self.limit // SMALLER))
            _join_all(gm, program, joined)
            return bool(joined)
        cap = memory_cap(simulate(program), self.memory_limit)
        found, best = bucketed(program, sizes(self.limit)[1:], memory_limit=cap)
        joined = buckets(program, found)
        if not joined:
            return False
        before = copy_graph(gm)
        _join_all(gm, program, joined)
        again = ctx.programs.of(gm, ctx.priced(self, gm), fused=self.fused)
        failing = _is_worse(again, best, program, cap)
        if failing:
            gm.graph = before.graph
            ctx.remark(self, output_node(gm.graph), f"not joined: {failing}")
        return not failing


def _is_worse(again: Program, best: Schedule, program: Program, cap: int) -> str:
    """Return in what respect the bucketed graph, `again`, is worse than `program`; "" if in none.

    `best` was found with predicted copies, `again` has those of the graph.
    """
    peak = simulate(again).peak_memory
    ordered = prefetch(
        again,
        best.window_bytes,
        fill=best.fill,
        held_seconds=best.held_seconds,
        memory_budget=best.memory_budget,
    )
    timeline = simulate(ordered)
    is_as_predicted = timeline.step_time <= (1 + WORTH) * best.timeline.step_time  # `best` saves more than that
    if max(peak, timeline.peak_memory) <= cap and is_as_predicted:
        return ""
    plain, seconds = (schedule(one, memory_limit=cap).timeline.step_time for one in (program, again))
    reason = f"predicted to take {plain:.5g} s, and {seconds:.5g} s and {peak} of {cap} bytes in buckets"
    return "" if peak <= cap and seconds <= plain else reason


def _join_all(gm: GraphModule, program: Program, joined: Sequence[Sequence[int]]) -> None:
    nodes = {node.name: node for node in gm.graph.nodes}
    for members in joined:
        _join([nodes[program.tasks[number].nodes[-1]] for number in members])


def _join(members: list[Node]) -> None:
    transfer = transfer_of(members[0])
    assert transfer is not None
    if KINDS[transfer.kind].bucket == "gather":
        _hoist(members)
        _Bucket(members, min(members)).gather()
        return
    waits = [next(iter(member.users)) for member in members]
    _sink(waits, _Bucket(members, max(members).next).reduce())


def _steps(member: Node) -> tuple[str, ...]:
    transfer = transfer_of(member)
    return () if transfer is None else transfer.steps


def _hoist(members: list[Node]) -> None:
    """Move what the members are computed from before the first of them."""
    first = min(members)
    needed: set[Node] = set()
    queue = list(members)
    while queue:
        for value in queue.pop().all_input_nodes:
            if value not in needed and first < value:
                needed.add(value)
                queue.append(value)
    for node in sorted(needed):
        first.prepend(node)


def _sink(waits: list[Node], results: list[Node]) -> None:
    """Give the results to the users of the waits, and move those users after the results."""
    moved: set[Node] = set()
    queue = [user for wait in waits for user in wait.users]
    while queue:
        node = queue.pop()
        if node.op != "output" and node not in moved:
            moved.add(node)
            queue.extend(node.users)
    _replace(waits, results)
    last = max(results)
    after = last.next
    for node in sorted(node for node in moved if node < last):
        after.prepend(node)


def _replace(waits: list[Node], results: list[Node]) -> None:
    for wait, result in zip(waits, results, strict=True):
        collective = operands(wait)[0]
        if has_layout(wait):
            set_layouts(result, *layouts_of(wait))
        wait.replace_all_uses_with(result)
        wait.graph.erase_node(wait)
        wait.graph.erase_node(collective)


class _Bucket:
    """Add one collective for `members` before the node `before`."""

    def __init__(self, members: list[Node], before: Node) -> None:
        self.members, self.graph, self.before = members, members[0].graph, before
        self.fake_mode = fake_mode_of([value_of(members[0])])

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call and compute its fake value."""
        return self.known(fake_call(self.fake_mode, op, args, kwargs), op, *args, **kwargs)

    def known(self, value: torch.Tensor, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call whose fake value is known."""
        with self.graph.inserting_before(self.before):
            new = add_call(self.graph, op, args, kwargs)
        set_value(new, value)
        copy_facts(self.members[0], new)
        set_note(new, note_of(self.members[0]))
        set_recompute(new, is_recompute(self.members[0]))
        return new

    def view(self, value: Node, shape: list[int]) -> Node:
        """Return `value` as `shape`, by a view if it has another."""
        return value if list(tensor_of(value).shape) == shape else self.call(aten.view.default, value, shape)

    def collective(self, value: Node) -> Node:
        """Add the collective of the members and its wait."""
        first = self.members[0]
        transfer = transfer_of(first)
        assert transfer is not None and isinstance(first.target, OpOverload)
        assert len({(member.target, *member.args[1:]) for member in self.members}) == 1, "members are sent, and reduced, alike"
        new = self.call(first.target, value, *first.args[1:])
        steps = tuple(step for member in self.members for step in _steps(member))
        set_transfer(new, replace(transfer, steps=steps))
        return self.call(c10d.wait_tensor.default, new)

    def gather(self) -> None:
        """Gather all members in one message and give the results to the users of their waits."""
        sources = [operands(member)[0] for member in self.members]
        lengths = [tensor_of(source).numel() for source in sources]
        flat = self.call(aten.cat.default, [self.view(s, [n]) for s, n in zip(sources, lengths, strict=True)])
        ranks = tensor_of(self.members[0]).numel() // lengths[0]
        table = self.view(self.collective(flat), [ranks, sum(lengths)])
        waits = [next(iter(member.users)) for member in self.members]
        parts = zip(self.columns(table, lengths), waits, strict=True)
        _replace(waits, [self.view(part, list(tensor_of(wait).shape)) for part, wait in parts])

    def reduce(self) -> list[Node]:
        """Reduce all members in one message, with a row for each rank that gets a part; return their results."""
        sources = [operands(member)[0] for member in self.members]
        lengths = [tensor_of(member).numel() for member in self.members]
        tables = [self.view(s, [tensor_of(s).numel() // n, n]) for s, n in zip(sources, lengths, strict=True)]
        parts = self.columns(self.collective(self.call(aten.cat.default, tables, 1)), lengths)
        shapes = [list(tensor_of(member).shape) for member in self.members]
        return [self.view(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def columns(self, table: Node, lengths: list[int]) -> list[Node]:
        """Cut `table` [ranks, sum of lengths] into its members' columns."""
        held, parts, start = tensor_of(table), [], 0
        for length in lengths:
            shape, place = (held.shape[0], length), int(held.storage_offset()) + start * held.stride(1)
            value = fake_view(self.fake_mode, held, shape, held.stride(), place)  # its shape, strides and offset are its own
            part = self.known(value, aten.slice.Tensor, table, 1, start, start + length)
            parts.append(self.call(aten.clone.default, part, memory_format=torch.contiguous_format))
            start += length
        return parts
