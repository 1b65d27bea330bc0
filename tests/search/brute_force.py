"""Find the cheapest of all assignments of a small factor graph without a backward, by the cost function that the search uses.

Variables are decided about one after the other. What those decided about cost so far, on each resource of each segment,
is a vector; of two that leave the same layouts to what is not decided about, one that is nowhere less is dropped. So all
assignments are covered, and few are written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.search.model.factor_graph import RESOURCES, FactorGraph, Floats
from passes.search.model.transitions import Transitions
from passes.search.model.unit_costs import UnitCosts

Standing = tuple[int, frozenset[int]]  # of a value: the layout it is made in (-1: not yet), and those needed so far
State = tuple[tuple[int, Standing], ...]  # of the values of which some, and not all, variables are decided about


def least_step(factor_graph: FactorGraph, unit_costs: UnitCosts, *, worst: float = float("inf")) -> float:
    """Return the seconds of the quickest assignment; those that take more than `worst` are dropped."""
    is_forward = all(value.gathered_in_forward < 0 and value.repeat_segment < 0 for value in factor_graph.values)
    assert is_forward, "keeping and repeating are not covered"
    plans = _Plans(factor_graph, unit_costs)
    states: dict[State, Floats] = {(): np.zeros((1, len(RESOURCES) * len(factor_graph.segments)))}
    for place, variable in enumerate(plans.order):
        ahead = plans.ahead(plans.order[place + 1 :])
        found: dict[State, list[Floats]] = {}
        for option in plans.options(variable):
            for state, vectors in states.items():
                moved = plans.moved(variable, option, dict(state))
                if moved is not None:
                    found.setdefault(moved.state, []).append(vectors + option.load + moved.load)
        states = {state: _undominated(np.concatenate(vectors), ahead, worst) for state, vectors in found.items()}
        states = {state: vectors for state, vectors in states.items() if len(vectors)}
    return min((float(_steps(vectors).min()) for vectors in states.values()), default=float("inf"))


@dataclass(frozen=True)
class _Option:
    """A strategy as it is to the rest of the factor_graph: layouts (positions in `Transitions`) by value, and what it takes."""

    made: tuple[tuple[int, int], ...]
    needed: tuple[tuple[int, int], ...]
    load: Floats


@dataclass(frozen=True)
class _Moved:
    state: State
    load: Floats


class _Plans:
    def __init__(self, factor_graph: FactorGraph, unit_costs: UnitCosts) -> None:
        self.factor_graph, self.unit_costs, self.transitions = factor_graph, unit_costs, Transitions(factor_graph, unit_costs)
        self.order = self._order()
        places = {variable: place for place, variable in enumerate(self.order)}
        around = [(value.maker.variable, *(user.variable for user in value.users)) for value in factor_graph.values]
        self.closed = [set(self.order[max(places[variable] for variable in one) :]) for one in around]
        self.costs: dict[tuple[int, int, int], Floats | None] = {}

    def options(self, number: int) -> Sequence[_Option]:
        """Return the strategies of a variable; of those with equal layouts the quickest."""
        variable, found = self.factor_graph.variables[number], dict[object, _Option]()
        for strategy in np.argsort(variable.seconds, kind="stable").tolist():
            load = np.zeros((len(self.factor_graph.segments), len(RESOURCES)))
            load[variable.segment] = variable.loads[:, strategy]
            made = [(v, int(slot.at[strategy])) for v, slot in enumerate(self.transitions.makers) if slot.variable == number]
            needed = [
                (v, int(slot.at[strategy])) for v, s in enumerate(self.transitions.users) for slot in s if slot.variable == number
            ]
            option = _Option(tuple(made), tuple(dict.fromkeys(needed)), load.ravel())
            found.setdefault((option.made, option.needed), option)
        return list(found.values())

    def _order(self) -> list[int]:
        """Order variables as they are, but each that is no call, as parameters are, where it is first used."""
        factor_graph = self.factor_graph
        at = {number: float(number) for number in range(len(factor_graph.variables))}
        for value in reversed(factor_graph.values):
            if factor_graph.variables[value.maker.variable].nodes[0].op == "placeholder":
                at[value.maker.variable] = min(user.variable for user in value.users) - 0.5
        return sorted(at, key=lambda number: at[number])

    def ahead(self, variables: Sequence[int]) -> Floats:
        """Return what variables compute at least."""
        load = np.zeros((len(self.factor_graph.segments), len(RESOURCES)))
        for number in variables:
            variable = self.factor_graph.variables[number]
            load[variable.segment] += variable.loads.min(1)
        return load.ravel()

    def moved(self, variable: int, option: _Option, open_: dict[int, Standing]) -> _Moved | None:
        """Return the values that are open after a strategy, and the load of its transitions; None if one is impossible."""
        load = np.zeros(len(RESOURCES) * len(self.factor_graph.segments))
        before = dict(open_)
        for value, made in option.made:
            open_[value] = made, open_.get(value, UNKNOWN)[1]
        for value, target in option.needed:
            made, needed = open_.get(value, UNKNOWN)
            open_[value] = made, needed | {target}
        for value in dict.fromkeys(v for v, _ in (*option.made, *option.needed)):
            for move in _pairs(open_[value]) - _pairs(before.get(value, UNKNOWN)):
                cost = self._cost(value, *move)
                if cost is None:
                    return None
                load += cost
        return _Moved(tuple(sorted((v, s) for v, s in open_.items() if variable not in self.closed[v])), load)

    def _cost(self, number: int, made: int, target: int) -> Floats | None:
        """Return the load of a transition; None where it is impossible."""
        key = number, made, target
        if key not in self.costs:
            value, transitions = self.factor_graph.values[number], self.transitions
            load = np.zeros((len(self.factor_graph.segments), len(RESOURCES)))
            terms = transitions.terms[number]
            if not terms.same[made, target]:
                self.costs[key] = None
                if terms.impossible[made, target]:
                    return None
                load[value.segment] = terms.loads[:, made, target]
            self.costs[key] = load.ravel()
        return self.costs[key]


UNKNOWN: Standing = (-1, frozenset())


def _pairs(standing: Standing) -> set[tuple[int, int]]:
    """Return the transitions that follow: from the layout that a value is made in to those needed."""
    made, needed = standing
    return {(made, target) for target in needed} if made >= 0 else set()


def _steps(vectors: Floats) -> Floats:
    """Return the seconds of each segment: of the busiest of its resources."""
    found: Floats = vectors.reshape(len(vectors), -1, len(RESOURCES)).max(2).sum(1)
    return found


def _undominated(vectors: Floats, ahead: Floats, worst: float) -> Floats:
    kept = np.unique(vectors[_steps(vectors + ahead) <= worst], axis=0)
    at = 0
    while at < len(kept):  # in order of the first coordinate: none is dominated by a later one
        kept = np.vstack([kept[: at + 1], kept[at + 1 :][(kept[at + 1 :] < kept[at]).any(1)]])
        at += 1
    return kept
