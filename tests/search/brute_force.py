"""The cheapest of all plans of a small problem without a backward, by the cost function that the search uses.

Variables are decided about one after the other. What those decided about cost so far, on each resource of each segment,
is a vector; of two that leave the same layouts to what is not decided about, one that is nowhere less is dropped. So all
plans are looked at, and few are written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.search.model import COMPUTE, charged
from passes.search.prices import Prices
from passes.search.problem import Floats, Problem
from passes.search.sides import Sides

Standing = tuple[int, frozenset[int]]  # of a value: the layout it is made in (-1: not yet), and those needed so far
State = tuple[tuple[int, Standing], ...]  # of the values of which some, and not all, variables are decided about


def least_step(problem: Problem, prices: Prices, *, worst: float = float("inf")) -> float:
    """Seconds of the quickest plan; those that take more than `worst` are not looked at."""
    assert all(value.again < 0 and value.backward < 0 for value in problem.values), "what is kept is not looked at"
    plans = _Plans(problem, prices)
    states: dict[State, Floats] = {(): np.zeros((1, 3 * len(problem.segments)))}
    for place, variable in enumerate(plans.order):
        ahead = plans.ahead(plans.order[place + 1 :])
        found: dict[State, list[Floats]] = {}
        for option in plans.options(variable):
            for state, vectors in states.items():
                moved = plans.moved(variable, option, dict(state))
                if moved is not None:
                    found.setdefault(moved.state, []).append(vectors + option.busy + moved.busy)
        states = {state: _undominated(np.concatenate(vectors), ahead, worst) for state, vectors in found.items()}
        states = {state: vectors for state, vectors in states.items() if len(vectors)}
    return min((float(_steps(vectors).min()) for vectors in states.values()), default=float("inf"))


@dataclass(frozen=True)
class _Option:
    """What a choice is to the rest of the problem: layouts (positions in `Sides`) by value, and what it takes."""

    made: tuple[tuple[int, int], ...]
    needed: tuple[tuple[int, int], ...]
    busy: Floats


@dataclass(frozen=True)
class _Moved:
    state: State
    busy: Floats


class _Plans:
    def __init__(self, problem: Problem, prices: Prices) -> None:
        self.problem, self.prices, self.sides = problem, prices, Sides(problem, prices)
        self.order = self._order()
        places = {variable: place for place, variable in enumerate(self.order)}
        around = [(value.maker.variable, *(use.variable for use in value.uses)) for value in problem.values]
        self.closed = [set(self.order[max(places[variable] for variable in one) :]) for one in around]
        self.fares: dict[tuple[int, int, int], Floats | None] = {}

    def options(self, number: int) -> Sequence[_Option]:
        """The choices of a variable; of those with equal layouts the quickest."""
        variable, found = self.problem.variables[number], dict[object, _Option]()
        for choice in np.argsort(variable.seconds, kind="stable").tolist():
            busy = np.zeros((len(self.problem.segments), 3))
            busy[variable.segment, COMPUTE] = variable.seconds[choice]
            made = [(v, int(slot.at[choice])) for v, slot in enumerate(self.sides.makers) if slot.variable == number]
            needed = [
                (v, int(slot.at[choice])) for v, s in enumerate(self.sides.users) for slot in s if slot.variable == number
            ]
            option = _Option(tuple(made), tuple(dict.fromkeys(needed)), busy.ravel())
            found.setdefault((option.made, option.needed), option)
        return list(found.values())

    def _order(self) -> list[int]:
        """Variables in their order, but each that is no call, as parameters are, where it is first used."""
        problem = self.problem
        at = {number: float(number) for number in range(len(problem.variables))}
        for value in reversed(problem.values):
            if problem.variables[value.maker.variable].nodes[0].op == "placeholder":
                at[value.maker.variable] = min(use.variable for use in value.uses) - 0.5
        return sorted(at, key=lambda number: at[number])

    def ahead(self, variables: Sequence[int]) -> Floats:
        """What variables compute at least."""
        busy = np.zeros((len(self.problem.segments), 3))
        for number in variables:
            variable = self.problem.variables[number]
            busy[variable.segment, COMPUTE] += variable.seconds.min()
        return busy.ravel()

    def moved(self, variable: int, option: _Option, open_: dict[int, Standing]) -> _Moved | None:
        """The values that are open behind a choice, and what moves cost that follow from it; None where one cannot be."""
        busy = np.zeros(3 * len(self.problem.segments))
        before = dict(open_)
        for value, made in option.made:
            open_[value] = made, open_.get(value, UNKNOWN)[1]
        for value, target in option.needed:
            made, needed = open_.get(value, UNKNOWN)
            open_[value] = made, needed | {target}
        for value in dict.fromkeys(v for v, _ in (*option.made, *option.needed)):
            for target in _pairs(open_[value]) - _pairs(before.get(value, UNKNOWN)):
                fare = self._fare(value, *target)
                if fare is None:
                    return None
                busy += fare
        return _Moved(tuple(sorted((v, s) for v, s in open_.items() if variable not in self.closed[v])), busy)

    def _fare(self, number: int, made: int, target: int) -> Floats | None:
        """What it takes to move a value; None where there is no way."""
        key = number, made, target
        if key not in self.fares:
            value, sides = self.problem.values[number], self.sides
            busy = np.zeros((len(self.problem.segments), 3))
            if sides.sources[number][made] != sides.targets[number][target]:
                move = sides.move(number, (made, target))
                self.fares[key] = None
                if move is None:
                    return None
                busy[value.segment] = charged(self.problem, value, move)
            self.fares[key] = busy.ravel()
        return self.fares[key]


UNKNOWN: Standing = (-1, frozenset())


def _pairs(standing: Standing) -> set[tuple[int, int]]:
    """The moves that follow: from the layout that a value is made in to those needed."""
    made, needed = standing
    return {(made, target) for target in needed} if made >= 0 else set()


def _steps(vectors: Floats) -> Floats:
    """A segment lasts as long as the busiest of its resources."""
    found: Floats = vectors.reshape(len(vectors), -1, 3).max(2).sum(1)
    return found


def _undominated(vectors: Floats, ahead: Floats, worst: float) -> Floats:
    kept = np.unique(vectors[_steps(vectors + ahead) <= worst], axis=0)
    at = 0
    while at < len(kept):  # in order of the first coordinate: none is dominated by a later one
        kept = np.vstack([kept[: at + 1], kept[at + 1 :][(kept[at + 1 :] < kept[at]).any(1)]])
        at += 1
    return kept
