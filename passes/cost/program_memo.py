"""Keep the last program that was built, for passes that price the same graph one after another.

Building a program takes as long as a pass, and most passes get the graph that the pass before them has priced.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from passes.cost.build_program import program_of_graph
from passes.cost.program import Program
from passes.ir.graph import outputs_of
from passes.ir.mesh import Mesh


@dataclass
class ProgramMemo:
    """A cache of the last program that was built, with everything in the graph that it depends on."""

    _facts: list[Any] = field(default_factory=list)
    _found: Program | None = None

    def of(self, gm: GraphModule, mesh: Mesh, *, fused: bool) -> Program:
        """Return `program_of_graph`, rebuilt only if the graph, the mesh or `fused` has changed."""
        facts: list[Any] = [mesh, fused, outputs_of(gm.graph)]
        for node in gm.graph.nodes:
            facts += (node, node.target, node.args, node.kwargs, *node.meta.values())
        if self._found is None or not _are_same(facts, self._facts):
            self._found = program_of_graph(gm, mesh, fused=fused)
        self._facts = facts
        return self._found


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """Return whether two lists hold the same objects: arguments and facts of a node are replaced, never changed in place."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
