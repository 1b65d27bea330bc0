"""The layouts between which each value can change, with the terms of every transition, computed once for all
searches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from passes.ir.layout import Layout
from passes.search.model.factor_graph import Bools, FactorGraph, Floats, Ints
from passes.search.model.objective import transition_terms
from passes.search.model.unit_costs import UnitCosts

Arc = tuple[int, int]  # positions of source and target
INFEASIBLE = 1e5  # seconds: the cost of the impossible, far above any step; finite, so that costs can be moved between factors


@dataclass(eq=False)
class Endpoint:
    """A variable at one end of a value: the layout (position on that side) that each of its strategies gives or needs."""

    variable: int
    at: Ints  # per strategy
    size: int  # layouts on this side
    order: Ints = field(init=False)
    starts: Ints = field(init=False)
    present: Ints = field(init=False)
    is_full: bool = field(init=False)  # every layout is of some strategy

    def __post_init__(self) -> None:
        self.order = np.argsort(self.at, kind="stable")
        ordered = self.at[self.order]
        self.starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        self.present = ordered[self.starts]
        self.is_full = len(self.present) == self.size

    def least_by_layout(self, costs: Floats) -> Floats:
        """Return, per layout, the least cost of a strategy that has it."""
        ordered = costs[self.order]
        least: Floats = ordered if len(self.starts) == len(ordered) else np.minimum.reduceat(ordered, self.starts)
        if self.is_full:
            return least
        found = np.full(self.size, INFEASIBLE)
        found[self.present] = least
        return found

    def layouts_of(self, strategies: Bools) -> Bools:
        """Mark the layouts that one of these strategies has."""
        found = np.zeros(self.size, dtype=np.bool_)
        found[self.at[strategies]] = True
        return found


class Transitions:
    """The transitions of all values: numbers of layouts in `sources` and `targets`, endpoints, and terms, each by value."""

    def __init__(self, factor_graph: FactorGraph, unit_costs: UnitCosts) -> None:
        self.factor_graph = factor_graph
        self.sources: list[list[int]] = []
        self.targets: list[list[int]] = []
        self.makers: list[Endpoint] = []
        self.users: list[list[Endpoint]] = []
        for value in factor_graph.values:
            made = factor_graph.made(value)
            needed = [factor_graph.needed(user) for user in value.users]
            self.sources.append(list(dict.fromkeys(made.tolist())))
            self.targets.append(list(dict.fromkeys(np.concatenate(needed).tolist())))
            self.makers.append(_endpoint(value.maker.variable, made, self.sources[-1]))
            pairs = zip(value.users, needed, strict=True)
            self.users.append([_endpoint(user.variable, numbers, self.targets[-1]) for user, numbers in pairs])
        self.terms = [
            transition_terms(factor_graph, value, self._layouts(sources), self._layouts(targets), unit_costs)
            for value, sources, targets in zip(factor_graph.values, self.sources, self.targets, strict=True)
        ]

    def corrected(self, strategies: Sequence[int], seconds: float, exposed: Mapping[str, float]) -> Transitions:
        """Return the same with the transitions between these `strategies`, one per variable, dearer by `seconds` in all.

        `exposed` are the seconds that the device waits, as simulated, for values whose messages can hide, by name: each is dearer
        by these, or where they are more than `seconds` in all, by its part of those. What is left is shared by all messages, each
        by its part of the seconds on links.
        """
        taken = [(number, arc, float(self.terms[number].link_seconds[arc])) for number, arc in self._taken(strategies)]
        names, on_links = [self.factor_graph.values[number].name for number, *_ in taken], [sent for *_, sent in taken]
        of_value = defaultdict[str, float](float)
        for name, sent in zip(names, on_links, strict=True):
            of_value[name] += sent
        waited = [_part(sent, of_value[name]) * exposed.get(name, 0.0) for name, sent in zip(names, on_links, strict=True)]
        known = min(sum(waited), seconds)
        dearer = [
            _part(one, sum(waited)) * known + _part(sent, sum(on_links)) * (seconds - known)
            for one, sent in zip(waited, on_links, strict=True)
        ]
        new = copy(self)
        new.terms = list(self.terms)
        for (number, (source, target), _), more in zip(taken, dearer, strict=True):
            terms = new.terms[number]
            loads = np.array(terms.loads)
            loads[:, source, target] += more
            new.terms[number] = replace(terms, loads=loads)
        return new

    def _taken(self, strategies: Sequence[int]) -> Iterator[tuple[int, Arc]]:
        """Yield the transitions between these strategies: the number of the value, source and target."""
        for number, (maker, users) in enumerate(zip(self.makers, self.users, strict=True)):
            source = int(maker.at[strategies[maker.variable]])
            targets = dict.fromkeys(int(user.at[strategies[user.variable]]) for user in users)
            yield from ((number, (source, target)) for target in targets if not self.terms[number].same[source, target])

    def _layouts(self, numbers: Sequence[int]) -> list[Layout]:
        return [self.factor_graph.layout(number) for number in numbers]


def _part(one: float, total: float) -> float:
    return one / total if total > 0.0 else 0.0


def _endpoint(variable: int, numbers: Ints, listed: Sequence[int]) -> Endpoint:
    at = {number: position for position, number in enumerate(listed)}
    return Endpoint(variable, np.array([at[number] for number in numbers.tolist()]), len(listed))
