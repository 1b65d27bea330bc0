"""Evaluate an assignment of strategies: the loads, bytes and seconds of its step, by the terms of the objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from passes.search.model.factor_graph import FORWARD_END, MOMENTS, RESOURCES, Floats
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.objective import step_seconds
from passes.search.model.transitions import Transitions


@dataclass(frozen=True)
class Assignment:
    """A strategy (its number) for each variable, with its costs.

    `kept` are numbers of parameters in the backward that use what the forward gathered, `repeated` those of other
    values whose transition is repeated in the backward instead of keeping its result. Objective in seconds, `bytes` [moment],
    `loads` [segment, resource] in seconds.
    """

    strategies: list[int]
    kept: list[int]
    repeated: list[int]
    objective: float
    bytes: Floats
    loads: Floats

    @property
    def memory(self) -> float:
        """Return the bytes at the peak."""
        return float(self.bytes.max())


def evaluations(
    transitions: Transitions, strategies: list[int], byte: float, budget: MemoryBudget | None
) -> list[Assignment]:
    """Return the assignments of these strategies that keep what is worth `byte` seconds a byte, all, and nothing; none if a
    transition is impossible."""
    found = [evaluate(transitions, strategies, keeps=keeps, budget=budget) for keeps in dict.fromkeys((byte, 0.0, math.inf))]
    return [assignment for assignment in found if assignment is not None]


def evaluate(
    transitions: Transitions,
    strategies: list[int],
    *,
    keeps: float,
    repeats: float | None = None,
    budget: MemoryBudget | None = None,
) -> Assignment | None:
    """Return the assignment of these strategies, None if a transition is impossible.

    A gathered parameter is kept for the backward, if that needs the same layout, if this saves at least `keeps` seconds
    on links per byte; the result of another value's transition if it saves at least `repeats` (by default the same).
    Bytes over the limit of `budget` are recomputed.
    """
    graph, repeats = transitions.factor_graph, keeps if repeats is None else repeats
    pairs = list(zip(graph.variables, strategies, strict=True))
    loads, nbytes = np.zeros((len(graph.segments), len(RESOURCES))), np.zeros(len(MOMENTS))
    for variable, strategy in pairs:
        loads[variable.segment] += variable.loads[:, strategy]
        nbytes += variable.state[:, strategy]
    nbytes += max((float(variable.working[strategy]) for variable, strategy in pairs), default=0.0)
    gathered = np.zeros(len(graph.segments))
    kept, repeated = [], []
    reached: list[set[int]] = []  # per value, the layouts (numbers) to which it has transitions
    for number, (value, terms) in enumerate(zip(graph.values, transitions.terms, strict=True)):
        source = int(transitions.makers[number].at[strategies[value.maker.variable]])
        reached.append(set())
        for target in dict.fromkeys(int(user.at[strategies[user.variable]]) for user in transitions.users[number]):
            arc, layout = (source, target), transitions.targets[number][target]
            if terms.same[arc]:
                continue
            if terms.impossible[arc]:
                return None
            reached[-1].add(layout)
            saved, moved, held = terms.link_seconds[arc], float(terms.moved[target]), float(terms.held[arc])
            earlier = value.gathered_in_forward
            if earlier >= 0 and layout in reached[earlier] and saved > keeps * moved:
                kept.append(number)
                nbytes[FORWARD_END] += moved
                continue
            if held and terms.repeats[arc] and saved <= repeats * held:
                repeated.append(number)
                loads[value.repeat_segment] += terms.repeat_loads[:, source, target]
            else:
                nbytes[FORWARD_END] += held
            gathered[value.segment] += terms.gathered[arc]
            loads[value.segment] += terms.loads[:, source, target]
    nbytes += gathered.max()
    objective = step_seconds(loads, nbytes, budget)
    return Assignment(strategies, sorted(set(kept)), sorted(set(repeated)), objective, nbytes, loads)
