"""State a restricted factor graph as a mixed-integer program, and read multipliers and assignments off its solutions.

Columns: whether a variable takes a strategy; per value and user, how much of which source layout becomes which target (a
flow); which transitions there are at all, at least each user's flow. Rows: a segment lasts at least as long as the load on
each of its resources; the bytes at each moment are within the budget.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import chain

import numpy as np

from passes.search.model.factor_graph import FORWARD_END, MOMENTS, Floats
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.objective import step_seconds
from passes.search.model.transitions import Transitions
from passes.search.solvers.evaluate import Assignment
from passes.search.solvers.highs import MILLISECONDS, MixedIntegerProgram, add_recomputation
from passes.search.solvers.mip_columns import TIE, Terms, add_columns
from passes.search.solvers.multipliers import Multipliers, weights_of
from passes.search.solvers.restriction import Restriction

ANY = 1.0  # relative gap: the first assignment is taken


class Formulation:
    """The program of the strategies and transitions that are left to consider."""

    def __init__(self, transitions: Transitions, restriction: Restriction, budget: MemoryBudget | None) -> None:
        self.factor_graph, self.budget = transitions.factor_graph, budget
        self.unit = 1.0 if budget is None else budget.unit  # of bytes
        self.program = MixedIntegerProgram()
        lasts = [self.program.column(MILLISECONDS, float("inf")) for _ in self.factor_graph.segments]
        self.made = add_columns(self.program, transitions, restriction, repeats=budget is not None)
        self.time_rows = [
            [self.made.row([(last, 1.0), *((column, -seconds) for column, seconds in load)], 0.0) for load in loads]
            for last, loads in zip(lasts, self.made.loads, strict=True)
        ]
        self.byte_rows: list[int] = []  # per moment
        self.recomputed: list[int] = []  # columns
        self.largest: dict[int, list[Terms]] = {}  # columns that are as large as the largest of some sums
        self.working_rows: list[int] = []  # per variable
        self.gathered_rows: list[int] = []  # per segment
        if budget is not None:
            self._add_memory(budget)

    def multipliers(self, time_limit: float | None, over: float | None = None) -> tuple[Multipliers, float] | None:
        """Return the duals of the linear relaxation and its seconds, None if it is infeasible or not solved in time.

        If it is infeasible, bytes over the limit cost `over` seconds each: then the duals lead to less memory.
        """
        found = self.program.duals(time_limit=time_limit)
        if found is None and over is not None:
            found = self._with_bytes_over(over).duals(time_limit=time_limit)
        if found is None:
            return None
        duals, seconds = found[0], found[1] / MILLISECONDS
        segments = tuple(weights_of(duals, rows) for rows in self.time_rows)
        if self.budget is None:
            return Multipliers(segments), seconds
        (forward, backward), working, gathered = (
            [max(0.0, float(duals[row])) / MILLISECONDS / self.unit for row in rows]
            for rows in (self.byte_rows, self.working_rows, self.gathered_rows)
        )
        backward = max(backward, sum(working) - forward, sum(gathered) - forward)  # equal, but for the solver's tolerance
        return Multipliers(segments, (forward, backward), tuple(working), tuple(gathered)), seconds

    def solve(self, gap: float, time_limit: float | None, nodes: int | None = None) -> tuple[Assignment | None, float]:
        """Return the best assignment found, None if there is none, and a proven lower bound in seconds."""
        solved = self.program.minimise(gap=gap, time_limit=time_limit, nodes=nodes)
        # The program's cost has the ties: less than their part of three times a segment, as no load is longer than that.
        bound = float("inf") if solved.is_infeasible else solved.bound / MILLISECONDS / (1 + 3 * TIE)
        return (None if solved.values is None else self._assignment(solved.values)), bound

    def fit(self, time_limit: float | None) -> Assignment | None:
        """Return an assignment that fits the memory, of any step; None if none was found. Bytes alone are minimised."""
        costs = [0.0] * len(self.program.costs)
        for column, nbytes in chain(*self.made.bytes):
            costs[column] += nbytes / self.unit
        for column in self.recomputed:
            costs[column] -= 1.0
        solved = replace(self.program, costs=costs).minimise(gap=ANY, time_limit=time_limit)
        return None if solved.values is None else self._assignment(solved.values)

    def _assignment(self, values: Floats) -> Assignment:
        picked = [max(columns, key=lambda strategy: values[columns[strategy]]) for columns in self.made.picks]
        for column, sums in self.largest.items():  # a solver may leave it larger where memory is ample
            values[column] = max((_sum(values, terms) for terms in sums), default=0.0) / self.unit
        loads = np.array([[_sum(values, load) for load in loads] for loads in self.made.loads])
        nbytes = np.array([_sum(values, terms) for terms in self.made.bytes])
        kept, repeated = (
            sorted({value for column, value in columns.items() if values[column] > 0.5})
            for columns in (self.made.keeps, self.made.repeats)
        )
        return Assignment(picked, kept, repeated, step_seconds(loads, nbytes, self.budget), nbytes, loads)

    def _with_bytes_over(self, seconds: float) -> MixedIntegerProgram:
        """Return the program with bytes over the limit at so many seconds each."""
        program = deepcopy(self.program)
        over = program.column(seconds * self.unit * MILLISECONDS, float("inf"))
        for row in self.byte_rows:
            program.extend(row, over, 1.0)
        return program

    def _add_memory(self, budget: MemoryBudget) -> None:
        """Limit the memory at each moment, in units: bytes that stay, the most that one call works on, and the most that one
        layer gathers."""
        working, gathered = (self.program.column(0.0, float("inf")) for _ in range(2))
        for terms in self.made.bytes:
            terms.extend([(working, self.unit), (gathered, self.unit)])
        picks = zip(self.factor_graph.variables, self.made.picks, strict=True)
        calls = [[(column, float(one.working[strategy])) for strategy, column in columns.items()] for one, columns in picks]
        self.working_rows = self._add_largest(working, calls)
        self.gathered_rows = self._add_largest(gathered, self.made.gathered)
        self.recomputed = add_recomputation(self.program, budget)
        for moment in MOMENTS:
            entries = [(column, -nbytes / self.unit) for column, nbytes in self.made.bytes[moment]]
            freed = [(column, 1.0) for column in self.recomputed] if moment == FORWARD_END else []
            self.byte_rows.append(self.made.row(entries + freed, -budget.limit / self.unit))

    def _add_largest(self, largest: int, sums: list[Terms]) -> list[int]:
        """Let a column be at least as large as each of the sums of bytes, and return the rows that say so."""
        self.largest[largest] = sums
        rows = ([(largest, 1.0), *((column, -nbytes / self.unit) for column, nbytes in terms)] for terms in sums)
        return [self.made.row(row, 0.0) for row in rows]


def _sum(values: Floats, terms: Terms) -> float:
    found: float = sum(values[column] * entry for column, entry in terms)
    return found
