"""Run a program on simulated ranks after the partition into forward and backward, with overlapped communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from autoshard.compile.compiled import Split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.config.options import Options
from autoshard.debug.simulated_ranks import Ranks, Results
from passes.base import Observer, Pass, PassContext
from passes.ir.graph import copy_graph


def run_overlapped(ranks: Ranks, options: Options) -> Results:
    """Run one step of the program that is given to the backend."""
    return ranks.run_partitioned(_overlapped(ranks, options))


def run_after_each_pass(ranks: Ranks, options: Options) -> Iterator[tuple[str, Results]]:
    """Return the results after the partition, and after each pass of the phase `overlap` that changes a graph."""
    kept: list[tuple[str, Split]] = []
    _overlapped(ranks, options, kept)
    return ((name, ranks.run_partitioned(split)) for name, split in kept)


def _overlapped(ranks: Ranks, options: Options, kept: list[tuple[str, Split]] | None = None) -> Split:
    """Return the program, partitioned and with its messages overlapped; `kept` gets copies of it on the way.

    Inductor's own rewriting before the partition is left out: its results may need Inductor's views.
    """
    split = split_program(ranks.planned.graph, mode="eager")
    observers = () if kept is None else (_Copier(split, kept),)
    if (overlap := OverlapPhase.of(options, ranks.planned.plan.mesh)) is not None:
        overlap.apply(split, mode=options.compile, observers=observers)
    return split


@dataclass
class _Copier(Observer):
    """Observer that copies a partitioned program at first, and after every pass that changes one of its graphs."""

    split: Split
    kept: list[tuple[str, Split]]

    def __post_init__(self) -> None:
        self._keep("partition")

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Do nothing: the program is kept after each pass."""

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if changed:
            self._keep(f"{pass_.name} ({'forward' if gm is self.split.forward else 'backward'})")

    def _keep(self, name: str) -> None:
        backward = None if self.split.backward is None else copy_graph(self.split.backward)
        self.kept.append((name, replace(self.split, forward=copy_graph(self.split.forward), backward=backward)))
