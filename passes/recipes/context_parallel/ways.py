"""The ways to run attention on a sharded sequence: what each needs of a call, and how it takes operands and gives results.

    gather      queries stay sharded; keys and values are whole, gathered again for the backward
    ring        queries, keys and values stay sharded
    all_to_all  queries, keys and values are exchanged for a part of the heads, and results back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from passes.ir.call import Call, call_of
from passes.ir.graph import item_of, operands, results_of, tensor_of
from passes.ir.layout import Placement, Shard
from passes.recipes.context_parallel.way_costs import POSITIONS, SECONDS, Attending, resized
from passes.recipes.recipe import Decision, Site
from passes.rules.attention import operand_names
from passes.rules.local_forms.attention_pieces import runs_in_blocks
from passes.rules.rule import Row, row_sharding, space_of

WAYS = tuple(SECONDS)  # in the order in which equally fast ones are chosen
EXCHANGE = "all_to_all"
_HEADS = 1
_KEYS = ("key", "value")
_WHY = {"query": "queries", "key": "keys", "value": "values", "grad_out": "gradient", "grad_out_": "gradient"}

Uses = dict[tuple[Node, int], Decision]


@dataclass(frozen=True)
class Attention:
    """A forward call of attention, its backward if there is one, and the piece of the sequence that a rank has."""

    node: Node
    backward: Node | None
    site: Site
    positions: Shard  # of queries, and of the result

    @property
    def is_causal(self) -> bool:
        return runs_in_blocks(call_of(self.node))

    @property
    def length(self) -> int:
        """Return the number of queries."""
        return results_of(self.node)[0].shape[POSITIONS]

    @property
    def calls(self) -> tuple[Node, ...]:
        return (self.node,) if self.backward is None else (self.node, self.backward)

    @property
    def heads(self) -> Shard:
        """Return the part of the heads that a rank has after an exchange, inside of those that other axes cut."""
        return Shard(_HEADS, self.site.feature_parts)

    def rows(self, way: str) -> tuple[Row | None, ...]:
        """Return the row by which each call runs, None if it has none."""
        found = []
        for node in self.calls:
            space, names = space_of(node), operand_names(call_of(node))
            placement = self.heads if way == EXCHANGE else self.positions
            by = "query" if way == "gather" else "key"
            row = None if space is None else row_sharding(space, names.index(by), placement, self.site.size)
            found.append(row if row is not None and row.operands[names.index("query")] == placement else None)
        return tuple(found)

    def refusal(self, way: str) -> str:
        """Return why the call cannot run in a way; empty if it can."""
        if all(row is not None for row in self.rows(way)):
            return ""
        keys, size = call_of(self.node).arg("key").shape, self.site.size
        if way == EXCHANGE and keys[_HEADS] % (size * self.site.feature_parts):
            parts = f"{size}" if self.site.feature_parts == 1 else f"{size} x {self.site.feature_parts}"
            return f"{keys[_HEADS]} heads of keys do not divide by {parts}"
        if way == "ring" and keys[POSITIONS] % (size * self.positions.outer):
            return f"{keys[POSITIONS]} keys do not divide by {size * self.positions.outer}"
        if way == "ring" and not self.refusal("gather"):
            return "a ring takes no bias of this kernel, and no kernel without a logsumexp"
        return (
            "no rule shards the positions of this call; leave out dropout, and give this kernel a mask instead of is_causal "
            "beside another mask, or where keys have another length"
        )

    def seconds(self, way: str) -> float:
        """Return the seconds of a layer, forward and backward; without known hardware, 0 for the first way."""
        hardware = self.site.mesh.hardware
        if hardware is None:
            return float(WAYS.index(way))
        calls = tuple(self._beside_other_axes(node) for node in self.calls)
        group = self.site.mesh.group_shape((self.site.mesh.names[self.site.axis],))
        return SECONDS[way](Attending(calls, self.site.size, self.positions.mirror > 0, group, hardware))

    def _beside_other_axes(self, node: Node) -> Call:
        call = call_of(node)
        query, key = call.arg("query").shape, call.arg("key").shape
        return resized(
            call,
            queries=query[POSITIONS],
            keys=key[POSITIONS],
            batch_parts=self.site.batch_parts,
            parts=self.site.feature_parts,
        )

    def before(self, way: str) -> Iterator[tuple[Node, Shard]]:
        """Yield the operands whose positions are sharded where they come from, and how."""
        values = operands(self.node)
        if way == EXCHANGE:
            for value in values[:3]:  # queries, keys and values
                if tensor_of(value).shape[POSITIONS] % (self.positions.outer * self.site.size) == 0:
                    yield value, self.positions
            return
        (row, *_) = self.rows(way)
        assert row is not None
        yield from ((value, at) for value, at in zip(values, row.operands, strict=True) if isinstance(at, Shard))

    def uses(self, way: str) -> Uses:
        """Return how the calls take their operands, and how others take their results."""
        found: Uses = {}
        for node, row in zip(self.calls, self.rows(way), strict=True):
            assert row is not None
            for number, (name, placement) in enumerate(zip(operand_names(call_of(node)), row.operands, strict=True)):
                if name in _WHY:
                    again = way == "gather" and name in _KEYS
                    found[node, number] = Decision(placement, f"context({way}): {_WHY[name]}", again=again)
            if way == EXCHANGE:
                found |= {use: Decision(at, f"context({way}): {why}") for use, at, why in self._returned(node)}
        return found

    def _returned(self, node: Node) -> Iterator[tuple[tuple[Node, int], Placement, str]]:
        """Yield who reads a result that is sharded on heads, as which operand, and the positions that it has elsewhere."""
        for item in node.users:
            made = item_of(item)
            if made is None or tensor_of(item).dim() != 4:
                continue
            at, why = self.positions, "result" if node is self.node else "gradient"
            for user in item.users:
                if user is not self.backward and user.op != "output":
                    yield from (((user, i), at, why) for i, value in enumerate(operands(user)) if value is item)
