"""Bound every assignment from below, and every assignment with a given strategy, by dual ascent.

The costs of a factor graph are those of strategies (unary) and of transitions (pairwise). Messages move cost between a
variable and its factors without changing what any assignment costs. Two sweeps over the variables, as in sequential
tree-reweighted message passing (TRW-S: Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization",
2006), move cost to where it collides; reduced costs stay non-negative, and the minima that are taken off them add up to
the bound. A strategy whose reduced cost is over the gap between bound and incumbent is in no better assignment and is
pruned (reduced-cost fixing).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from passes.search.model.factor_graph import Floats
from passes.search.model.transitions import INFEASIBLE
from passes.search.solvers.adjacency import Adjacency
from passes.search.solvers.transition_factors import TransitionFactor


@dataclass(eq=False)
class Dual:
    """A reparametrization of the costs: an assignment costs `bound` plus its entries in `unary` and in the factors."""

    unary: list[Floats]  # per variable, reduced costs of its strategies
    factors: list[TransitionFactor]
    adjacency: Adjacency
    bound: float = 0.0
    slack: float = float("inf")  # a strategy whose reduced cost is more than this is pruned
    deadline: float = float("inf")  # by `time.perf_counter`: after it `ascend` makes one sweep a call
    pruned: list[NDArray[np.bool_]] = field(default_factory=list)  # per variable and strategy

    def __post_init__(self) -> None:
        self.pruned = self.pruned or [np.zeros(len(costs), dtype=np.bool_) for costs in self.unary]

    def ascend(self, sweeps: int, tolerance: float = 1e-5) -> None:
        """Sweep forward and backward until the bound grows by less than `tolerance` of itself."""
        for _ in range(sweeps):
            before = self.bound
            for variable in range(len(self.unary)):
                self._visit(variable, forward=True)
            for variable in reversed(range(len(self.unary))):
                self._visit(variable, forward=False)
            if time.perf_counter() > self.deadline:
                break
            if self.bound - before < tolerance * max(self.bound, 1e-12):
                break

    def prune(self, threshold: float, sweeps: int) -> None:
        """Prune strategies that are in no assignment that costs less than `threshold` (reduced-cost fixing)."""
        self.slack = threshold - self.bound
        self.ascend(sweeps, 0.0)

    @property
    def pruned_cost(self) -> float:
        """Return the least cost of a transition that counts as pruned."""
        return min(self.slack, INFEASIBLE / 2)

    def copied(self) -> Dual:
        """Return a copy, to be pruned or to ascend from here."""
        factors = [factor.copied() for factor in self.factors]
        return replace(
            self,
            unary=[costs.copy() for costs in self.unary],
            factors=factors,
            pruned=[pruned.copy() for pruned in self.pruned],
        )

    def _collect(self, variable: int) -> None:
        """Pass the messages of all adjacent factors to a variable, and its minimum to the bound."""
        costs = self.unary[variable]
        for number in self.adjacency.outgoing[variable]:
            factor = self.factors[number]
            factor.share()
            transitions = factor.costs
            least = np.minimum.reduce(transitions, axis=2)
            transitions -= least[:, :, None]
            costs = costs + (least[0] if len(least) == 1 else np.add.reduce(least, axis=0))[factor.maker.at]
        for number, user in self.adjacency.incoming[variable]:
            factor = self.factors[number]
            transitions = factor.costs[user]
            least = np.minimum.reduce(transitions, axis=0)
            transitions -= least
            costs = costs + least[factor.users[user].at]
        low = float(np.minimum.reduce(costs))
        self.bound += low
        costs = costs - low
        self.slack -= low
        if self.slack < INFEASIBLE:
            self.pruned[variable] |= costs > self.slack
        costs[self.pruned[variable]] = INFEASIBLE
        self.unary[variable] = costs

    def _visit(self, variable: int, *, forward: bool) -> None:
        """Collect, then pass an equal part of the reduced costs to each factor that leads ahead."""
        self._collect(variable)
        ahead, rest_count = self.adjacency.ahead[forward][variable]
        if not ahead:
            return
        rest = self.unary[variable]
        part = rest / max(len(ahead), rest_count)
        for number, user in ahead:
            factor = self.factors[number]
            endpoint = factor.maker if user < 0 else factor.users[user]
            moved = endpoint.least_by_layout(part)
            rest = rest - moved[endpoint.at]
            if user < 0:
                transitions = factor.costs[-1 - user]
                transitions += moved[:, None]
            else:
                transitions = factor.costs[user]
                transitions += moved
        self.unary[variable] = np.maximum(rest, 0.0)
