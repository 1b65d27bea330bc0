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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.search.model.factor_graph import Floats, Ints
from passes.search.model.transitions import INFEASIBLE
from passes.search.solvers.transition_factors import TransitionFactor


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


_Ahead = tuple[list[tuple[int, int]], int]  # factors and user numbers, -1 less it for the maker; and how many are not ahead


@dataclass(eq=False)
class Dual:
    """A reparametrization of the costs: an assignment costs `bound` plus its entries in `unary` and in the factors."""

    unary: list[Floats]  # per variable, reduced costs of its strategies
    factors: list[TransitionFactor]
    bound: float = 0.0
    slack: float = float("inf")  # a strategy whose reduced cost is more than this is pruned
    deadline: float = float("inf")  # by `time.perf_counter`: after it `ascend` makes one sweep a call
    pruned: list[NDArray[np.bool_]] = field(default_factory=list)  # per variable and strategy
    outgoing: list[list[int]] = field(default_factory=list)  # per variable, factors of the values that it makes
    # Per variable, factors of the values that it uses and its number among their users.
    incoming: list[list[tuple[int, int]]] = field(default_factory=list)
    ahead: list[list[_Ahead]] = field(default_factory=list)  # per variable, backward and forward

    def __post_init__(self) -> None:
        self.pruned = [np.zeros(len(costs), dtype=np.bool_) for costs in self.unary]
        self.outgoing = [[] for _ in self.unary]
        self.incoming = [[] for _ in self.unary]
        for number, factor in enumerate(self.factors):
            self.outgoing[factor.maker.variable].append(number)
            for user, endpoint in enumerate(factor.users):
                self.incoming[endpoint.variable].append((number, user))
        variables = range(len(self.unary))
        self.ahead = [[self._ahead(variable, forward=forward) for variable in variables] for forward in (False, True)]

    def _ahead(self, variable: int, *, forward: bool) -> _Ahead:
        ahead: list[tuple[int, int]] = []
        rest_count = 0
        ends = [(n, -1 - user, s.variable) for n in self.outgoing[variable] for user, s in enumerate(self.factors[n].users)]
        ends += [(number, user, self.factors[number].maker.variable) for number, user in self.incoming[variable]]
        for number, user, other in ends:
            if (other > variable) == forward and other != variable:
                ahead.append((number, user))
            else:
                rest_count += 1
        return ahead, rest_count

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

    def exclude(self, variable: int, strategies: Ints) -> None:
        """Prune these strategies of a variable."""
        self.pruned[variable][strategies] = True
        self.unary[variable][strategies] = INFEASIBLE

    def prune(self, threshold: float, sweeps: int) -> None:
        """Prune strategies that are in no assignment that costs less than `threshold` (reduced-cost fixing)."""
        self.slack = threshold - self.bound
        self.ascend(sweeps, 0.0)

    def remaining(self) -> Restriction:
        """Return the strategies and transitions that were not pruned."""
        transitions = [(e.costs < self.pruned_cost) & (e.used > 0) for e in self.factors]
        return Restriction([~pruned for pruned in self.pruned], transitions)

    def cheapest(self, most: int, assignments: Sequence[Sequence[int]] = ()) -> Restriction:
        """Return the `most` cheapest strategies of each variable that were not pruned, and all of `assignments`."""
        chosen = [~pruned for pruned in self.pruned]
        for variable, strategies in enumerate(chosen):
            if strategies.sum() > most:
                costs = np.where(strategies, self.min_marginals(variable), INFEASIBLE)
                strategies[np.argsort(costs, kind="stable")[most:]] = False
            strategies[[picked[variable] for picked in assignments]] = True
        found = []
        for factor in self.factors:
            made = factor.maker.layouts_of(chosen[factor.maker.variable])[:, None] & (factor.transitions < INFEASIBLE)
            users = [user.layouts_of(chosen[user.variable])[None, :] for user in factor.users]
            found.append(np.stack([made & needed for needed in users]))
        return Restriction(chosen, found)

    def min_marginals(self, variable: int) -> Floats:
        """Return the reduced cost of each strategy of a variable with the best of its neighbours: min-marginals over the bound,
        as far as the adjacent factors know."""
        costs = self.unary[variable].copy()
        for number in self.outgoing[variable]:
            factor = self.factors[number]
            costs += factor.costs.min(2).sum(0)[factor.maker.at]
        for number, user in self.incoming[variable]:
            factor = self.factors[number]
            costs += factor.costs[user].min(0)[factor.users[user].at]
        return costs

    @property
    def pruned_cost(self) -> float:
        """Return the least cost of a transition that counts as pruned."""
        return min(self.slack, INFEASIBLE / 2)

    def copied(self) -> Dual:
        """Return a copy, to be pruned or to ascend from here."""
        factors = [factor.copied() for factor in self.factors]
        new = Dual([costs.copy() for costs in self.unary], factors, self.bound, self.slack, self.deadline)
        new.pruned = [pruned.copy() for pruned in self.pruned]
        return new

    def compacted(self) -> tuple[Dual, list[Ints]]:
        """Return the dual without what was pruned and, per variable, the numbers of the strategies that are left."""
        kept = [np.flatnonzero(~pruned) for pruned in self.pruned]
        factors = [factor.compacted(kept) for factor in self.factors]
        unary = [costs[numbers] for costs, numbers in zip(self.unary, kept, strict=True)]
        return Dual(unary, factors, self.bound, self.slack, self.deadline), kept

    def _collect(self, variable: int) -> None:
        """Pass the messages of all adjacent factors to a variable, and its minimum to the bound."""
        costs = self.unary[variable]
        for number in self.outgoing[variable]:
            factor = self.factors[number]
            factor.share()
            transitions = factor.costs
            least = np.minimum.reduce(transitions, axis=2)
            transitions -= least[:, :, None]
            self._prune_transitions(transitions)
            costs = costs + (least[0] if len(least) == 1 else np.add.reduce(least, axis=0))[factor.maker.at]
        for number, user in self.incoming[variable]:
            factor = self.factors[number]
            transitions = factor.costs[user]
            least = np.minimum.reduce(transitions, axis=0)
            transitions -= least
            self._prune_transitions(transitions)
            costs = costs + least[factor.users[user].at]
        low = float(np.minimum.reduce(costs))
        self.bound += low
        costs = costs - low
        self.slack -= low
        if self.slack < INFEASIBLE:
            self.pruned[variable] |= costs > self.slack
        costs[self.pruned[variable]] = INFEASIBLE
        self.unary[variable] = costs

    def _prune_transitions(self, transitions: Floats) -> None:
        """Prune what costs more than the slack."""
        if self.slack < INFEASIBLE:
            np.copyto(transitions, INFEASIBLE, where=transitions > self.slack)

    def _visit(self, variable: int, *, forward: bool) -> None:
        """Collect, then pass an equal part of the reduced costs to each factor that leads ahead."""
        self._collect(variable)
        ahead, rest_count = self.ahead[forward][variable]
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

    def rounded(self, order: Sequence[int]) -> list[int]:
        """Round to an assignment: each variable in `order` takes the strategy that is cheapest beside those before it."""
        picked = [-1] * len(self.unary)
        for variable in order:
            costs = self.unary[variable].copy()
            for number in self.outgoing[variable]:
                factor = self.factors[number]
                for user, endpoint in enumerate(factor.users):
                    if picked[endpoint.variable] >= 0:
                        costs += factor.costs[user][:, endpoint.at[picked[endpoint.variable]]][factor.maker.at]
            for number, user in self.incoming[variable]:
                factor = self.factors[number]
                maker = factor.maker
                if picked[maker.variable] >= 0:
                    costs += factor.costs[user][maker.at[picked[maker.variable]]][factor.users[user].at]
            picked[variable] = int(costs.argmin())
        return picked
