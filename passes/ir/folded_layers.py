"""The layers that a folded graph leaves out, and which kept layer represents each.

A model of many equal layers is planned on a graph of a few: `passes/fold.py` removes the others and records them here.
Decisions for a kept layer also hold for the layers that it represents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Equal layers `prefix.<index>`, the removed ones between as many kept ones as the pattern is long.

    `removed` is a multiple of the period; `below` and `above` are a period each. With period 2 and layers that
    alternate, `below=(1, 2), removed=(3, 4, 5, 6), above=(7, 8)`: layer 1 stands for 3 and 5 as well. With `is_wide`,
    `below` and `above` are equal to the removed layers but for what they read and what reads them: a forward call of a
    removed layer is that of `above`, which reads from the layer before it, and a backward call that of `below`. If
    `above` is empty then, `below` is the only layer, and all calls are its own.
    """

    prefix: str  # FQN of the list: "layers", "bert.encoder.layer"
    below: tuple[int, ...]
    removed: tuple[int, ...]
    above: tuple[int, ...]
    is_wide: bool = False  # layers that read other values stand for the removed ones

    @property
    def period(self) -> int:
        return len(self.below)

    @property
    def copies(self) -> int:
        """Return how many removed layers each of `below` stands for."""
        return len(self.removed) // self.period

    def __str__(self) -> str:
        kept = ", ".join(f"{self.prefix}.{index}" for index in self.below)
        return f"{kept} for {self.prefix}.{self.removed[0]} to {self.prefix}.{self.removed[-1]}"


@dataclass(frozen=True)
class Repeats:
    """Nodes and layers that were removed from a graph.

    `nodes` maps each name of the whole graph to its representative, `parameters` (buffers too) each removed one.
    """

    runs: tuple[Run, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    def count(self, fqn: str) -> int:
        """Return how many modules of the whole model the kept module `fqn` stands for, itself included."""
        for run in self.runs:
            index = index_in(run.prefix, fqn)
            if index in run.below:
                return 1 + run.copies
        return 1


def index_in(prefix: str, fqn: str) -> int | None:
    """Return the index of the layer of list `prefix` that module `fqn` is or is part of; None for any other module."""
    if not fqn.startswith(prefix) or fqn[len(prefix) : len(prefix) + 1] != ".":
        return None
    index = fqn[len(prefix) + 1 :].partition(".")[0]
    return int(index) if index.isdecimal() else None


def moved_to(prefix: str, index: int, fqn: str) -> str:
    """Return the FQN in layer `index` that corresponds to `fqn`, which is part of a layer of list `prefix`."""
    rest = fqn[len(prefix) + 1 :].partition(".")[2]
    return f"{prefix}.{index}.{rest}" if rest else f"{prefix}.{index}"


def expand_names(repeats: Repeats, kept: Mapping[str, T]) -> dict[str, T]:
    """Extend a mapping of the kept layers to the whole graph, by node name, or by FQN of parameter or buffer.

    A name of the whole graph gets the entry of its representative, if there is one. Names of nodes hold no dot
    (`mm_3@layers.7` aside), and those of removed parameters do, so that both can stand in one mapping.
    """
    own = set(repeats.nodes.values())
    found = {name: value for name, value in kept.items() if name not in own}
    for names in (repeats.nodes, repeats.parameters):
        found |= {removed: kept[name] for removed, name in names.items() if name in kept}
    return found
