"""The mixed-integer program of a problem.

Columns: a choice per variable; per value and user, what of which layout becomes which (a flow); what moves at all (a
flow bounds it from below), shared by the users. Per segment its time T, at least its computation with the moves
that cannot hide, and at least what each link carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.search.milp import Answer, Program
from passes.search.prices import Prices
from passes.search.problem import Floats, Ints, Move, Problem, Value

BUCKET = 25 << 20  # bytes
SCALE = 1e3  # seconds to the unit of the program: milliseconds


@dataclass(frozen=True)
class Arc:
    """A value of layout `source` is needed as `target`."""

    source: int
    target: int
    move: Move
    share: float  # seconds that it adds to the step at least... when nothing hides it


@dataclass(frozen=True)
class Picked:
    """The number of each variable's choice; objective and bound in seconds."""

    picked: list[int]
    objective: float
    bound: float


@dataclass
class Model:
    """`alive` are the choices that are looked at, `slack` the seconds over `base` that a plan may take."""

    problem: Problem
    prices: Prices
    slack: float
    alive: list[Ints] = field(default_factory=list)
    arcs: list[list[Arc]] = field(default_factory=list)

    def reduce(self) -> None:
        problem = self.problem
        self.alive = [np.flatnonzero(v.seconds - v.seconds.min() <= self.slack) for v in problem.variables]
        self.arcs = [self._arcs(value) for value in problem.values]

    def solve(self, gap: float, time_limit: float | None) -> Picked | None:
        """None where no plan was found."""
        program, picks = self.program()
        answer = program.minimise(gap=gap, time_limit=time_limit)
        if answer.values is None:
            return None
        values = answer.values
        picked = [max(columns, key=lambda choice: values[columns[choice]]) for columns in picks]
        return Picked(picked, answer.objective / SCALE, answer.bound / SCALE)

    def _arcs(self, value: Value) -> list[Arc]:
        made = list(dict.fromkeys(self.problem.made(value)[self.alive[value.maker.variable]].tolist()))
        needed: dict[int, None] = {}
        for use in value.uses:
            needed |= dict.fromkeys(self.problem.needed(use)[self.alive[use.variable]].tolist())
        found = []
        for source in made:
            for target in needed:
                if source == target:
                    found.append(Arc(source, target, Move(), 0.0))
                    continue
                move = self.prices.move(
                    value.shape, value.itemsize, self.problem.layout(source), self.problem.layout(target),
                    BUCKET if value.hides else 0,
                )
                if move is None:
                    continue
                least = move.local if value.hides else move.total
                if least * value.count <= self.slack:
                    found.append(Arc(source, target, move, least * value.count))
        return found

    def program(self) -> tuple[Program, list[dict[int, int]]]:
        p, problem = Program(), self.problem
        total = [p.column(SCALE, float("inf")) for _ in problem.segments]
        rows = {(g, w): ([total[g]], [1.0]) for g in range(len(problem.segments)) for w in ("compute", "inside", "across")}

        def add(segment: int, what: str, column: int, seconds: float) -> None:
            if seconds:
                rows[segment, what][0].append(column)
                rows[segment, what][1].append(-seconds)

        picks: list[dict[int, int]] = []
        for variable, alive in zip(problem.variables, self.alive, strict=True):
            picks.append({int(c): p.column(integer=True) for c in alive})
            p.row(list(picks[-1].values()), [1.0] * len(alive), 1.0, 1.0)
            for c, column in picks[-1].items():
                add(variable.segment, "compute", column, float(variable.seconds[c]))
        moved: list[dict[tuple[int, int], int]] = []
        for number, value in enumerate(problem.values):
            moved.append({})
            arcs = self.arcs[number]
            shared = {}
            exposed = problem.segments[value.segment].exposed
            for arc in arcs:
                if arc.source == arc.target:
                    continue
                column = p.column(1e-6 * SCALE * arc.move.total)
                shared[arc.source, arc.target] = column
                for what, seconds in (("inside", arc.move.inside), ("across", arc.move.across)):
                    add(value.segment, what, column, seconds * value.count)
                hidden = arc.move.inside + arc.move.across
                crit = arc.move.local + (hidden * exposed if value.hides else hidden)
                add(value.segment, "compute", column, crit * value.count)
            moved[-1] = shared
            made = problem.made(value)
            for use in value.uses:
                need = problem.needed(use)
                flow = {}
                for arc in arcs:
                    key = arc.source, arc.target
                    if len(value.uses) == 1 and value.again < 0 and key in shared:
                        flow[key] = shared[key]
                    else:
                        flow[key] = p.column(0.0)
                        if key in shared:
                            p.row([shared[key], flow[key]], [1.0, -1.0], 0.0, float("inf"))
                for side, layouts, variable in ((0, made, value.maker.variable), (1, need, use.variable)):
                    by: dict[int, list[int]] = {}
                    for key, column in flow.items():
                        by.setdefault(key[side], []).append(column)
                    groups: dict[int, list[int]] = {}
                    for c, column in picks[variable].items():
                        groups.setdefault(int(layouts[c]), []).append(column)
                    for layout, columns in groups.items():
                        flows = by.get(layout, [])
                        p.row([*flows, *columns], [1.0] * len(flows) + [-1.0] * len(columns), 0.0, 0.0)
        for columns, entries in rows.values():
            p.row(columns, entries, 0.0, float("inf"))
        return p, picks
