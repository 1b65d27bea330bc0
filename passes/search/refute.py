"""That no plan is shorter than so many seconds: by probing what the largest calls may do, and by branching.

A variable's choices fall into classes: the same dims on the same axes, in whatever order. With one class alone the
bound rises; where it passes the time in question, no shorter plan is in that class, and it is struck from all that
follows. What is left when nothing more can be struck is split, class by class.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir.layout import Shard
from passes.search.bound import Dual
from passes.search.problem import Ints, Problem, Variable

LARGE = 0.002  # of the bound: variables whose computation takes as much are probed
CLASSES = 12  # of a variable, at most
PROBES = 600  # then it is given up
SWEEPS = 3  # of dual ascent, per probe
TOLERANCE = 1e-3


def is_refuted(problem: Problem, dual: Dual) -> bool:
    """Whether `dual`, from which was struck what is in no plan shorter than the time in question, leaves none; False
    where this was not found out in `PROBES`, or by the dual's deadline."""
    if dual.slack < 0:
        return True
    least = LARGE * dual.bound
    seconds = [float(variable.seconds.min()) for variable in problem.variables]
    order = sorted((number for number, one in enumerate(seconds) if one > least), key=lambda number: -seconds[number])
    classes = [[_class_of(variable, choice) for choice in range(len(variable.choices))] for variable in problem.variables]
    return _Refutation(order, PROBES).holds(dual, classes)


def _class_of(variable: Variable, number: int) -> Hashable:
    """Of a choice: on which axes its first result is split in which dims, or is a term."""
    results = variable.choices[number].results
    return tuple(p.dim if isinstance(p, Shard) else str(p) for p in results[0].placements) if results else ()


@dataclass
class _Refutation:
    order: Sequence[int]  # variables to probe
    left: int  # probes

    def holds(self, dual: Dual, classes: Sequence[Sequence[Hashable]]) -> bool:
        dual, kept = dual.compacted()
        classes = [[one[choice] for choice in numbers] for one, numbers in zip(classes, kept, strict=True)]
        dual.ascend(SWEEPS, 0.0)
        while dual.slack >= 0:
            before = self._alive(dual)
            for variable in self.order:
                if dual.slack >= 0 and not self._probe(dual, classes, variable):
                    return False
            if dual.slack < 0 or self._alive(dual) == before:
                break
        if dual.slack < 0:
            return True
        for variable in self.order:
            groups = _groups(dual, classes, variable)
            if len(groups) > 1:
                return all(self.holds(_with(dual, variable, group), classes) for group in groups)
        return False

    def _alive(self, dual: Dual) -> int:
        return sum(int((~dual.struck[variable]).sum()) for variable in self.order)

    def _probe(self, dual: Dual, classes: Sequence[Sequence[Hashable]], variable: int) -> bool:
        """Strike classes that are in no shorter plan; False where no probes, or no time, are left."""
        groups = _groups(dual, classes, variable)
        if not 1 < len(groups) <= CLASSES:
            return True
        for group in groups:
            if self.left <= 0 or time.perf_counter() > dual.deadline:
                return False
            self.left -= 1
            probed = _with(dual, variable, group)
            probed.ascend(SWEEPS, TOLERANCE)
            if probed.slack < 0:
                dual.exclude(variable, group)
        dual.ascend(1, 0.0)
        return True


def _groups(dual: Dual, classes: Sequence[Sequence[Hashable]], variable: int) -> list[Ints]:
    """Choices of each class that are not struck."""
    found: dict[Hashable, list[int]] = {}
    for choice in np.flatnonzero(~dual.struck[variable]).tolist():
        found.setdefault(classes[variable][choice], []).append(choice)
    return [np.array(choices) for choices in found.values()]


def _with(dual: Dual, variable: int, choices: Ints) -> Dual:
    """The dual with no other choices of a variable."""
    found = dual.copied()
    others = np.ones(len(dual.choices[variable]), dtype=np.bool_)
    others[choices] = False
    found.exclude(variable, np.flatnonzero(others))
    return found
