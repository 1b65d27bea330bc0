"""Prove by probing and branching that no assignment is shorter than a threshold.

A variable's strategies fall into classes: the same dims on the same axes, in whatever order. With one class alone the
bound rises; where it passes the threshold, no shorter assignment is in that class, and it is pruned. When nothing
more can be pruned, the remaining strategies are branched on, class by class.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir.layout import Shard
from passes.search.model.factor_graph import FactorGraph, Ints, Variable
from passes.search.solvers.dual_ascent import Dual

PROBED = 0.002  # of the bound: variables whose computation takes more than this are probed
CLASSES = 12  # a variable with more is not probed: each is a probe
PROBES = 600  # of all branches together; then the proof is given up
SWEEPS = 3  # of dual ascent, at most, per probe
TOLERANCE = 1e-3  # of the bound: a probe's sweep that adds less is its last

Classes = Sequence[Sequence[Hashable]]  # per variable and strategy


def is_empty(graph: FactorGraph, dual: Dual) -> bool:
    """Return whether no assignment costs less than the threshold that `dual` was pruned by.

    False if this was not proven within `PROBES`, or by the dual's deadline.
    """
    if dual.slack < 0:
        return True
    least = PROBED * dual.bound
    seconds = [float(variable.seconds.min()) for variable in graph.variables]
    order = sorted((number for number, one in enumerate(seconds) if one > least), key=lambda number: -seconds[number])
    classes = [[_class_of(variable, number) for number in range(len(variable.strategies))] for variable in graph.variables]
    return _Proof(order, PROBES).holds(dual, classes)


def _class_of(variable: Variable, number: int) -> Hashable:
    """Name the class of a strategy: per axis, the dim in which its first result is sharded, or how it is partial."""
    results = variable.strategies[number].results
    return tuple(p.dim if isinstance(p, Shard) else str(p) for p in results[0].placements) if results else ()


@dataclass
class _Proof:
    """A proof in progress, with the probes that are left."""

    order: Sequence[int]  # variables to probe
    probes: int  # that are left; counted over all branches

    def holds(self, dual: Dual, classes: Classes) -> bool:
        dual, kept = dual.compacted()
        classes = [[one[number] for number in numbers] for one, numbers in zip(classes, kept, strict=True)]
        dual.ascend(SWEEPS, 0.0)
        while dual.slack >= 0:
            before = self._alive(dual)
            for variable in self.order:
                if dual.slack >= 0 and not self._probe(dual, classes, variable):
                    return False
            if dual.slack < 0 or self._alive(dual) == before:
                break
        return dual.slack < 0 or self._branch(dual, classes)

    def _branch(self, dual: Dual, classes: Classes) -> bool:
        for variable in self.order:
            groups = _grouped(dual, classes, variable)
            if len(groups) > 1:
                return all(self.holds(_restricted(dual, variable, group), classes) for group in groups)
        return False

    def _alive(self, dual: Dual) -> int:
        return sum(int((~dual.pruned[variable]).sum()) for variable in self.order)

    def _probe(self, dual: Dual, classes: Classes, variable: int) -> bool:
        """Prune classes that no shorter assignment has; return False if no probes, or no time, are left."""
        groups = _grouped(dual, classes, variable)
        if not 1 < len(groups) <= CLASSES:
            return True
        for group in groups:
            if self.probes <= 0 or time.perf_counter() > dual.deadline:
                return False
            self.probes -= 1
            probed = _restricted(dual, variable, group)
            probed.ascend(SWEEPS, TOLERANCE)
            if probed.slack < 0:
                dual.exclude(variable, group)
        dual.ascend(1, 0.0)
        return True


def _grouped(dual: Dual, classes: Classes, variable: int) -> list[Ints]:
    """Return the strategies of each class that are not pruned."""
    found: dict[Hashable, list[int]] = {}
    for number in np.flatnonzero(~dual.pruned[variable]).tolist():
        found.setdefault(classes[variable][number], []).append(number)
    return [np.array(numbers) for numbers in found.values()]


def _restricted(dual: Dual, variable: int, numbers: Ints) -> Dual:
    """Return a copy with no other strategies of a variable."""
    found = dual.copied()
    others = np.ones(len(dual.unary[variable]), dtype=np.bool_)
    others[numbers] = False
    found.exclude(variable, np.flatnonzero(others))
    return found
