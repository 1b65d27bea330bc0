"""Hold the search against HiGHS alone on random graphs: `python -m tests.search.unpruned [--graphs 300] [--seed 0]`.

HiGHS gets the whole program twice: of the strategies that the search has, none of them pruned by a bound; and of all
strategies, where every call is a variable of its own and no row is left out. The first shows that pruning loses nothing;
the second, what the strategies that are never enumerated cost.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from unittest.mock import patch

import passes.rules  # registers the rules
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.search.goal import Goal
from passes.search.model import grouping, strategies
from passes.search.model.factor_graph import FactorGraph
from passes.search.model.transitions import Transitions
from passes.search.model.unit_costs import UnitCosts
from passes.search.optimize import solve
from passes.search.prepared import prepare
from passes.search.search_state import SearchState
from passes.search.solvers.mip_columns import TIE
from passes.search.solvers.restriction import Restriction, cheapest
from tests.search.random_graphs import random_graph

assert passes.rules
EXACT = Goal(gap=1e-6)
ALL = 1 << 30
TRANSITIONS = 40_000  # of a program that HiGHS solves without help; a larger one is left out
MESHES = (("tp=2", "h100"), ("tp=8", "a100-pcie"), ("dp=2,tp=2", "h100"), ("dp=16,tp=8", "b200"))
SAME = 3 * TIE  # of a step: what programs add to tell equally quick assignments apart


@dataclass(frozen=True)
class Steps:
    """Seconds of the best step of one graph: as searched, by HiGHS alone, and by HiGHS of all strategies."""

    searched: float
    alone: float
    everything: float | None  # None: the program is too large for HiGHS without help

    @property
    def agrees(self) -> bool:
        """Return whether the search found nothing worse than HiGHS does alone."""
        return self.searched <= self.alone * (1 + SAME)

    @property
    def lost(self) -> float:
        """Return the part of the step that strategies which are never enumerated would save."""
        return 0.0 if self.everything is None else max(0.0, 1 - self.everything / self.searched)


def problem_of(text: str, hardware: str = "h100") -> tuple[FactorGraph, UnitCosts]:
    """Return the factor graph of a graph on the mesh that its text names."""
    gm, parsed = parse_graph(text)
    prepared = prepare(gm, Mesh(parsed.names, parsed.sizes, hardware=hardware))
    return prepared.factor_graph, prepared.node_costs.unit_costs


def drawn(seed: int) -> tuple[str, str]:
    """Return a graph of 10 to 60 calls on one axis, 10 to 20 on two, and the hardware."""
    draw = random.Random(seed)
    mesh, hardware = MESHES[seed % len(MESHES)]
    return random_graph(seed, mesh, draw.randint(10, 20 if "," in mesh else 60)), hardware


def steps(text: str, hardware: str) -> Steps | None:
    """Return the best steps of a graph; None if its program is too large for HiGHS without help."""
    problem = problem_of(text, hardware)
    alone = solved_alone(*problem)
    if alone is None:
        return None
    with patch.object(grouping, "SMALL", ALL), patch.object(strategies, "ROWS", ALL):
        everything = solved_alone(*problem_of(text, hardware))
    return Steps(solve(*problem, EXACT)[0].objective, alone, everything)


def solved_alone(factor_graph: FactorGraph, unit_costs: UnitCosts) -> float | None:
    """Return the step in seconds that HiGHS finds without our bounds; None if the program is too large."""
    state = SearchState(Transitions(factor_graph, unit_costs), EXACT)
    everything: Restriction = cheapest(state.dual, ALL)
    if everything.size > TRANSITIONS:
        return None
    assignment, _ = state.formulation(everything).solve(EXACT.gap, None)
    assert assignment is not None, "a plan is always possible"
    return assignment.objective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    given = parser.parse_args()
    started, seed, found = time.perf_counter(), given.seed, list[Steps]()
    while len(found) < given.graphs:
        if (one := steps(*drawn(seed))) is not None:
            found.append(one)
            if not one.agrees or one.lost > SAME:
                print(f"seed {seed}: searched {one.searched:.6g} s, alone {one.alone:.6g} s, lost {one.lost:.2%}", flush=True)
        seed += 1
    compared = [one for one in found if one.everything is not None]
    print(f"{sum(one.agrees for one in found)} of {len(found)} graphs: the search finds nothing worse than HiGHS alone")
    lost = [one.lost for one in compared if one.lost > SAME]
    most = max((one.lost for one in compared), default=0.0)
    print(f"{len(compared)} of them with all strategies: {len(lost)} would be faster, by {most:.2%} at most")
    print(f"{seed - given.seed - len(found)} graphs too large for HiGHS alone; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
