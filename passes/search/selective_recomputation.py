"""Choose which values of a model's blocks to save for the backward if not all fit, by a mixed-integer program.

A value that the backward needs is saved, or recomputed from saved ones at the cost of its call; that of a fused call is
its part of the kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph

from passes.cost.fused_regions import is_alias, node_nbytes
from passes.cost.saved_values import saved_or_remade
from passes.ir.folded_layers import Repeats
from passes.ir.graph import origin_of, transfer_of
from passes.ir.recompute_blocks import Blocks
from passes.search.solvers.highs import MixedIntegerProgram

GAP = 1e-4  # of the seconds that are recomputed: to which the program is solved
IDLE = 1e-3  # fraction of all seconds: the price of saving all bytes, so that nothing is saved without a gain


@dataclass(frozen=True)
class SelectiveRecomputation:
    """The kinds of values in the blocks of a LOCAL graph that can be recomputed.

    It holds their bytes in all blocks, the seconds to recompute them, and the kinds that they are computed from.
    """

    nbytes: Mapping[str, int]  # of those that can be saved
    seconds: Mapping[str, float]
    sources: Mapping[str, tuple[str, ...]]
    needed: tuple[str, ...]  # by the backward itself
    names: frozenset[str] = frozenset()  # of the nodes
    block: int = 0  # bytes of the largest block

    @staticmethod
    def of(graph: Graph, repeats: Repeats, seconds_of: Mapping[str, float]) -> SelectiveRecomputation:
        """Take the values of `graph`. `seconds_of` is by node name; recomputing a node without an entry is free."""
        blocks = Blocks.of(graph)
        remade = [node for node, saving in saved_or_remade(blocks, frozenset()).items() if saving == "remade"]
        nbytes: dict[str, int] = defaultdict(int)
        seconds: dict[str, float] = defaultdict(float)
        sources: dict[str, dict[str, None]] = defaultdict(dict)
        needed: dict[str, None] = {}
        inside: dict[str, int] = defaultdict(int)
        for node in remade:
            kind, count = blocks.kind[node], repeats.count(origin_of(node).fqn)
            seconds[kind] += count * seconds_of.get(node.name, 0.0)
            sources[kind] |= {blocks.kind[value]: None for value in node.all_input_nodes if value in blocks.kind}
            if not is_alias(node) and transfer_of(node) is None:
                nbytes[kind] += count * node_nbytes(node)
                inside[blocks.block[node]] += count // repeats.count(blocks.block[node]) * node_nbytes(node)
            if any(user not in blocks.forward and user.op != "output" for user in node.users):
                needed[kind] = None
        made = {kind: tuple(kinds) for kind, kinds in sources.items()}
        names = frozenset(node.name for node in remade)
        return SelectiveRecomputation(nbytes, seconds, made, tuple(needed), names, max(inside.values(), default=0))

    def size(self, kinds: Sequence[str]) -> int:
        """Return the bytes of these kinds in all blocks."""
        return sum(self.nbytes[kind] for kind in kinds)

    def within(self, limit: float) -> tuple[str, ...]:
        """Return the kinds to save in `limit` bytes, so that recomputation takes least time."""
        return self._solved(limit)[0]

    def recomputing(self, limit: float) -> float:
        """Return the seconds of recomputation if `limit` bytes are saved."""
        return self._solved(limit)[1]

    def _solved(self, limit: float) -> tuple[tuple[str, ...], float]:
        program, worth = MixedIntegerProgram(), IDLE * sum(self.seconds.values()) / max(limit, 1.0)
        kept = {
            kind: program.column(cost=worth * count, integer=True)
            for kind, count in self.nbytes.items()
            if 0 < count <= limit
        }
        again = {kind: program.column(cost=seconds) for kind, seconds in self.seconds.items()}

        def require(kind: str, user: str | None = None) -> None:
            """Require that a kind is saved or recomputed; for a user, only if that is recomputed."""
            columns = [again[kind], *([kept[kind]] if kind in kept else []), *([again[user]] if user else [])]
            entries = [1.0] * (len(columns) - 1) + [-1.0 if user else 1.0]
            program.row(columns, entries, 0.0 if user else 1.0, float("inf"))

        for kind in self.needed:
            require(kind)
        for user, sources in self.sources.items():
            for kind in sources:
                if kind in again and kind != user:
                    require(kind, user)
        program.row(list(kept.values()), [self.nbytes[kind] / max(limit, 1.0) for kind in kept], 0.0, 1.0)
        answer = program.minimise(gap=GAP, time_limit=None)
        assert answer.values is not None, "saving nothing is always possible"
        kinds = tuple(kind for kind, column in kept.items() if answer.values[column] > 0.5)
        return kinds, sum(float(answer.values[column]) * self.seconds[kind] for kind, column in again.items())
