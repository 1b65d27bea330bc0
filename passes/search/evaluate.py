"""What a plan costs by the model of the search."""

from __future__ import annotations

import numpy as np

from passes.search.model import COMPUTE, Plan, charged, repeated
from passes.search.room import Room
from passes.search.sides import Sides


def evaluate(
    sides: Sides, picked: list[int], *, keeps: float, repeats: float | None = None, room: Room | None = None
) -> Plan | None:
    """The plan of these choices; None where a value cannot move as they need. What is over the limit of `room` is computed
    again.

    What the forward gathered of parameters stays for the backward, where that needs the same, if that saves at least
    `keeps` seconds on links for a byte; what it moved of other values, if `repeats` (by default the same).
    """
    problem, repeats = sides.problem, keeps if repeats is None else repeats
    busy = np.zeros((len(problem.segments), 3))
    memory = problem.base
    for variable, choice in zip(problem.variables, picked, strict=True):
        busy[variable.segment, COMPUTE] += variable.seconds[choice]
        memory += variable.state[choice]
    memory += max((float(v.held[c]) for v, c in zip(problem.variables, picked, strict=True)), default=0.0)
    gathered = np.zeros(len(problem.segments))  # bytes of a layer's parameters, as it uses them
    kept, again = [], []
    moved: list[set[int]] = []  # per value, the layouts (numbers) that it is moved to
    for number, value in enumerate(problem.values):
        source = int(sides.makers[number].at[picked[value.maker.variable]])
        targets = dict.fromkeys(int(slot.at[picked[slot.variable]]) for slot in sides.users[number])
        moved.append(set())
        for target in targets:
            layout = sides.targets[number][target]
            if layout == sides.sources[number][source]:
                continue
            move, tariff = sides.move(number, (source, target)), sides.tariffs[number]
            if move is None:
                return None
            moved[-1].add(layout)
            nbytes = float(tariff.moved[target])
            seconds = (move.inside + move.across) * value.count
            if value.again >= 0 and layout in moved[value.again] and seconds > keeps * nbytes:
                kept.append(number)
                memory += nbytes
                continue
            held = float(tariff.held[source, target])
            if held and value.backward >= 0 and seconds <= repeats * held:
                again.append(number)
                busy[value.backward] += repeated(problem, value, move)
            else:
                memory += held
            gathered[value.segment] += nbytes / problem.segments[value.segment].layers if value.is_parameter else 0.0
            busy[value.segment] += charged(problem, value, move)
    total = float(memory + gathered.max())
    objective = float(busy.max(1).sum()) + (room.seconds(total) if room is not None else 0.0)
    return Plan(picked, sorted(set(kept)), sorted(set(again)), objective, 0.0, total, busy)
