"""Relax the objective to a sum of unary and pairwise costs, whose bound dual ascent finds.

A segment lasts as long as its busiest resource. Any weights of the resources that sum to 1 give at most that; so does a
price on bytes, less what the memory limit allows. Under such multipliers every cost belongs to one strategy or to one
transition.
"""

from __future__ import annotations

import numpy as np

from passes.search.model.factor_graph import Floats
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.transitions import INFEASIBLE, Transitions
from passes.search.solvers.adjacency import adjacency_of
from passes.search.solvers.dual_ascent import Dual
from passes.search.solvers.multipliers import Multipliers, Weights
from passes.search.solvers.transition_factors import TransitionFactor


class Relaxation:
    """A factor graph under multipliers that can change, and its dual."""

    def __init__(self, transitions: Transitions) -> None:
        self.transitions, self.factor_graph = transitions, transitions.factor_graph
        self.multipliers = Multipliers.computation(self.factor_graph)
        factors = [
            TransitionFactor(
                transitions.makers[number], transitions.users[number], self._pairwise(number, self.multipliers)
            )
            for number in range(len(self.factor_graph.values))
        ]
        variables = range(len(self.factor_graph.variables))
        unary = [self._unary(number, self.multipliers) for number in variables]
        self.dual = Dual(unary, factors, adjacency_of(factors, len(unary)))

    def discount(self, budget: MemoryBudget | None) -> float:
        """Return the seconds that the dual's bound is over a bound on the step, as bytes below the limit are free."""
        return 0.0 if budget is None else budget.worth(self.multipliers.bytes)

    def reweigh(self, multipliers: Multipliers) -> None:
        """Change the multipliers; the dual ascends from where it is."""
        dual = self.dual
        for number in range(len(self.factor_graph.variables)):
            change = self._unary(number, multipliers) - self._unary(number, self.multipliers)
            costs = dual.unary[number] + change
            low = float(costs.min())
            dual.unary[number] = costs - low
            dual.bound += low
        for number, factor in enumerate(dual.factors):
            factor.reweigh(self._pairwise(number, multipliers))
            dual.bound += factor.lift()
        self.multipliers = multipliers

    def _unary(self, number: int, multipliers: Multipliers) -> Floats:
        variable = self.factor_graph.variables[number]
        found = _weighted(multipliers.segments[variable.segment], variable.loads) + _weighted(multipliers.bytes, variable.state)
        return found + variable.working * multipliers.working[number] if multipliers.working else found

    def _pairwise(self, number: int, multipliers: Multipliers) -> Floats:
        """Return the cost of each transition of a value, by the cheaper of what may be done about its bytes."""
        value, terms, byte = self.factor_graph.values[number], self.transitions.terms[number], multipliers.saved
        seconds = _weighted(multipliers.segments[value.segment], terms.loads)
        if multipliers.gathered:
            seconds += multipliers.gathered[value.segment] * terms.gathered
        if value.gathered_in_forward >= 0:
            seconds = np.minimum(seconds, byte * np.where(terms.same, 0.0, terms.moved[None, :]))
        held = byte * terms.held
        if value.repeat_segment >= 0:
            again = _weighted(multipliers.segments[value.repeat_segment], terms.repeat_loads)
            held = np.where(terms.repeats, np.minimum(held, again), held)
        return np.where(terms.impossible, INFEASIBLE, seconds + held)


def _weighted(weights: Weights, loads: Floats) -> Floats:
    found: Floats = np.tensordot(weights, loads, 1)
    return found
