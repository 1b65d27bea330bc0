"""Restrict a search to part of its strategies and transitions: those not pruned, or the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.search.model.transitions import INFEASIBLE
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.dual_rounding import min_marginals


@dataclass(eq=False)
class Restriction:
    """The strategies per variable and the transitions [user, source, target] per value that a search still considers."""

    strategies: list[NDArray[np.bool_]]
    transitions: list[NDArray[np.bool_]]

    @property
    def is_possible(self) -> bool:
        """Return whether every variable has a strategy."""
        return all(bool(strategies.any()) for strategies in self.strategies)

    @property
    def size(self) -> int:
        """Count transitions, each user's by itself."""
        return sum(int(transitions.sum()) for transitions in self.transitions)

    def joined(self, other: Restriction) -> Restriction:
        """Return the union of both."""
        strategies = [a | b for a, b in zip(self.strategies, other.strategies, strict=True)]
        return Restriction(strategies, [a | b for a, b in zip(self.transitions, other.transitions, strict=True)])


def remaining(dual: Dual) -> Restriction:
    """Return the strategies and transitions that were not pruned."""
    transitions = [(factor.costs < dual.pruned_cost) & (factor.used > 0) for factor in dual.factors]
    return Restriction([~pruned for pruned in dual.pruned], transitions)


def cheapest(dual: Dual, most: int, assignments: Sequence[Sequence[int]] = ()) -> Restriction:
    """Return the `most` cheapest strategies of each variable that were not pruned, and all of `assignments`."""
    chosen = [~pruned for pruned in dual.pruned]
    for variable, strategies in enumerate(chosen):
        if strategies.sum() > most:
            costs = np.where(strategies, min_marginals(dual, variable), INFEASIBLE)
            strategies[np.argsort(costs, kind="stable")[most:]] = False
        strategies[[picked[variable] for picked in assignments]] = True
    found = []
    for factor in dual.factors:
        made = factor.maker.layouts_of(chosen[factor.maker.variable])[:, None] & (factor.transitions < INFEASIBLE)
        users = [user.layouts_of(chosen[user.variable])[None, :] for user in factor.users]
        found.append(np.stack([made & needed for needed in users]))
    return Restriction(chosen, found)
