"""The factors next to each variable of a factor graph, and those that a sweep of dual ascent has yet to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.search.solvers.transition_factors import TransitionFactor

_Ahead = tuple[list[tuple[int, int]], int]  # factors and user numbers, -1 less it for the maker; and how many are not ahead


@dataclass(frozen=True, eq=False)
class Adjacency:
    """The factors next to each variable."""

    outgoing: Sequence[Sequence[int]]  # per variable, factors of the values that it makes
    incoming: Sequence[Sequence[tuple[int, int]]]  # per variable, factors of values that it uses, its number among users
    ahead: Sequence[Sequence[_Ahead]]  # of a sweep: backward and forward, per variable


def adjacency_of(factors: Sequence[TransitionFactor], variables: int) -> Adjacency:
    """Return the factors next to each of so many variables."""
    outgoing: list[list[int]] = [[] for _ in range(variables)]
    incoming: list[list[tuple[int, int]]] = [[] for _ in range(variables)]
    for number, factor in enumerate(factors):
        outgoing[factor.maker.variable].append(number)
        for user, endpoint in enumerate(factor.users):
            incoming[endpoint.variable].append((number, user))
    ends = [
        [
            *((n, -1 - user, endpoint.variable) for n in outgoing[variable] for user, endpoint in enumerate(factors[n].users)),
            *((n, user, factors[n].maker.variable) for n, user in incoming[variable]),
        ]
        for variable in range(variables)
    ]
    ahead = [[_ahead(variable, found, forward=way) for variable, found in enumerate(ends)] for way in (False, True)]
    return Adjacency(outgoing, incoming, ahead)


def _ahead(variable: int, ends: Sequence[tuple[int, int, int]], *, forward: bool) -> _Ahead:
    ahead = [(number, user) for number, user, other in ends if (other > variable) == forward and other != variable]
    return ahead, len(ends) - len(ahead)
