"""What a plan costs by the model of the search."""

from __future__ import annotations

import numpy as np

from passes.search.model import ACROSS, COMPUTE, INSIDE, Plan
from passes.search.prices import Prices
from passes.search.problem import Problem
from passes.search.relax import Sides, move_of


def evaluate(problem: Problem, sides: Sides, prices: Prices, picked: list[int], *, keeps: float) -> Plan | None:
    """The plan of these choices; None where a value cannot move as they need.

    What the forward gathered of parameters stays for the backward, where that needs the same, if that saves at least
    `keeps` seconds on links for a byte.
    """
    busy = np.zeros((len(problem.segments), 3))
    memory = problem.base
    for variable, choice in zip(problem.variables, picked, strict=True):
        busy[variable.segment, COMPUTE] += variable.seconds[choice]
        memory += variable.state[choice]
    memory += max((float(v.held[c]) for v, c in zip(problem.variables, picked, strict=True)), default=0.0)
    gathered = np.zeros(len(problem.segments))  # bytes of a layer's parameters, as it uses them
    kept = []
    moved: list[set[int]] = []  # per value, the layouts (numbers) that it is moved to
    for number, value in enumerate(problem.values):
        source = int(sides.makers[number].at[picked[value.maker.variable]])
        targets = dict.fromkeys(int(slot.at[picked[slot.variable]]) for slot in sides.users[number])
        waits = problem.segments[value.segment].exposed if value.hides else 1.0
        moved.append(set())
        for target in targets:
            layout = sides.targets[number][target]
            if layout == sides.sources[number][source]:
                continue
            move = move_of(problem, sides, prices, number, (source, target))
            if move is None:
                return None
            moved[-1].add(layout)
            nbytes = prices.nbytes(value.shape, value.itemsize, problem.layout(layout)) * value.count
            saves = (move.inside + move.across) * value.count
            if value.again >= 0 and layout in moved[value.again] and saves > keeps * nbytes:
                kept.append(number)
                memory += nbytes
                continue
            memory += nbytes if value.saved else 0.0
            gathered[value.segment] += nbytes / problem.segments[value.segment].layers if value.is_parameter else 0.0
            row = busy[value.segment]
            row[INSIDE] += move.inside * value.count
            row[ACROSS] += move.across * value.count
            row[COMPUTE] += (move.local + waits * (move.inside + move.across)) * value.count
    objective = float(busy.max(1).sum())
    return Plan(picked, sorted(set(kept)), objective, 0.0, float(memory + gathered.max()), busy)
