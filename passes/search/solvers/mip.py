"""State a restricted factor graph as a mixed-integer program, and read multipliers and assignments off its solutions.

Columns: whether a variable takes a strategy; per value and user, how much of which source layout becomes which target (a
flow); which transitions there are at all, at least each user's flow. Rows: a segment lasts at least as long as the load on
each of its resources; the bytes of all that stays are within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.search.model.factor_graph import Bools, Floats, Ints, Value
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.objective import COMPUTE, GB, TransitionTerms, step_seconds
from passes.search.model.transitions import Arc, Transitions
from passes.search.solvers.dual_ascent import Restriction
from passes.search.solvers.evaluate import Assignment
from passes.search.solvers.highs import MILLISECONDS, MixedIntegerProgram, add_recomputation
from passes.search.solvers.multipliers import Multipliers, weights_of

TIE = 1e-4  # of a transition's seconds: of assignments that are equally quick, prefer the one that communicates less

Terms = list[tuple[int, float]]  # columns and their entries


class Formulation:
    """The program of the strategies and transitions that are left to consider."""

    def __init__(self, transitions: Transitions, restriction: Restriction, budget: MemoryBudget | None) -> None:
        self.transitions, self.factor_graph, self.budget = transitions, transitions.factor_graph, budget
        self.program = MixedIntegerProgram()
        segments = self.factor_graph.segments
        self.lasts = [self.program.column(MILLISECONDS, float("inf")) for _ in segments]
        self.loads: list[tuple[Terms, Terms, Terms]] = [([], [], []) for _ in segments]
        self.bytes: Terms = []
        self.gathered: list[Terms] = [[] for _ in segments]
        self.picks = [
            self._add_variable(number, np.flatnonzero(strategies).tolist())
            for number, strategies in enumerate(restriction.strategies)
        ]
        self.moved: list[dict[Arc, int]] = []  # per value, columns of its transitions
        self.keeps: dict[int, int] = {}  # column -> value
        self.repeats: dict[int, int] = {}  # column -> value
        for number, open_ in enumerate(restriction.transitions):
            self._add_value(number, open_)
        self.time_rows = [
            [
                self._row([(self.lasts[segment], 1.0), *((column, -seconds) for column, seconds in load)], 0.0)
                for load in loads
            ]
            for segment, loads in enumerate(self.loads)
        ]
        self.byte_row = -1
        self.working_rows: list[int] = []  # per variable
        self.gathered_rows: list[int] = []  # per segment
        if budget is not None:
            self._add_memory(budget)

    def multipliers(self, time_limit: float | None) -> Multipliers | None:
        """Return the duals of the linear relaxation, None if it is infeasible or not solved in time."""
        duals = self.program.duals(time_limit=time_limit)
        if duals is None:
            return None
        segments = tuple(weights_of(duals, rows) for rows in self.time_rows)
        if self.byte_row < 0:
            return Multipliers(segments)
        working, gathered = (
            [max(0.0, float(duals[row])) / MILLISECONDS / GB for row in rows]
            for rows in (self.working_rows, self.gathered_rows)
        )
        byte = max(0.0, float(duals[self.byte_row])) / MILLISECONDS / GB
        return Multipliers(segments, max(byte, sum(working), sum(gathered)), tuple(working), tuple(gathered))

    def solve(self, gap: float, time_limit: float | None, nodes: int | None = None) -> tuple[Assignment | None, float]:
        """Return the best assignment found, None if there is none, and a proven lower bound in seconds."""
        solved = self.program.minimise(gap=gap, time_limit=time_limit, nodes=nodes)
        # The program's cost has the ties: less than three times their part of a segment, which is the longest of three.
        bound = float("inf") if solved.is_infeasible else solved.bound / MILLISECONDS / (1 + 3 * TIE)
        return (None if solved.values is None else self._assignment(solved.values)), bound

    def _assignment(self, values: Floats) -> Assignment:
        picked = [max(columns, key=lambda strategy: values[columns[strategy]]) for columns in self.picks]
        loads = np.array([[_sum(values, load) for load in loads] for loads in self.loads])
        memory = self.factor_graph.base + float(_sum(values, self.bytes))
        kept, repeated = (
            sorted({value for column, value in columns.items() if values[column] > 0.5})
            for columns in (self.keeps, self.repeats)
        )
        return Assignment(picked, kept, repeated, step_seconds(loads, memory, self.budget), memory, loads)

    # --- variables

    def _add_variable(self, number: int, alive: list[int]) -> dict[int, int]:
        variable = self.factor_graph.variables[number]
        columns = {strategy: self.program.column(integer=True) for strategy in alive}
        self._row([(column, 1.0) for column in columns.values()], 1.0, 1.0)
        for strategy, column in columns.items():
            self._load(variable.segment, COMPUTE, column, float(variable.seconds[strategy]))
            self._hold(column, float(variable.state[strategy]))
        return columns

    # --- values

    def _add_value(self, number: int, open_: Bools) -> None:
        """Add the transitions of a value, and the flow of each user through them."""
        value, terms = self.factor_graph.values[number], self.transitions.terms[number]
        columns = self._add_transitions(number, np.any(open_, axis=0))
        serving = {arc: [column] for arc, column in columns.items()}
        if value.gathered_in_forward >= 0:
            self._add_keeps(number, serving)
        is_only_user = len(value.users) == 1 and value.gathered_in_forward < 0
        for user, endpoint in enumerate(self.transitions.users[number]):
            flow: dict[Arc, int] = {}
            for source, target in np.argwhere(open_[user]).tolist():
                arc = source, target
                if terms.same[arc]:
                    flow[arc] = self.program.column()
                elif arc in columns and is_only_user:
                    flow[arc] = columns[arc]
                elif arc in columns:
                    flow[arc] = self.program.column()
                    self._row([*((column, 1.0) for column in serving[arc]), (flow[arc], -1.0)], 0.0)
            maker = self.transitions.makers[number]
            self._balance(flow, 0, maker.at, self.picks[maker.variable])
            self._balance(flow, 1, endpoint.at, self.picks[endpoint.variable])

    def _add_transitions(self, number: int, open_: Bools) -> dict[Arc, int]:
        value, terms = self.factor_graph.values[number], self.transitions.terms[number]
        arcs: list[Arc] = [(s, t) for s, t in np.argwhere(open_ & ~terms.same & ~terms.impossible).tolist()]
        columns = {arc: self._transition_column(terms, arc) for arc in arcs}
        self.moved.append(columns)
        for (source, target), column in columns.items():
            for resource, seconds in enumerate(terms.loads[:, source, target].tolist()):
                self._load(value.segment, resource, column, seconds)
        for arc, column in columns.items():
            if value.is_parameter:
                self.gathered[value.segment].append((column, float(terms.gathered[arc])))
            self._hold(column, float(terms.held[arc]))
            if terms.held[arc] and value.repeat_segment >= 0 and self.budget is not None:
                self._add_repeat(number, value, arc, column)
        return columns

    def _transition_column(self, terms: TransitionTerms, arc: Arc) -> int:
        return self.program.column(TIE * MILLISECONDS * float(terms.seconds[arc]))

    def _add_repeat(self, number: int, value: Value, arc: Arc, transition: int) -> None:
        """Let a transition be repeated in the backward instead of keeping its result."""
        terms = self.transitions.terms[number]
        column = self._transition_column(terms, arc)
        self.repeats[column] = number
        self._row([(transition, 1.0), (column, -1.0)], 0.0)
        self._hold(column, -float(terms.held[arc]))
        for resource, seconds in enumerate(terms.repeat_loads[:, arc[0], arc[1]].tolist()):
            self._load(value.repeat_segment, resource, column, seconds)

    def _add_keeps(self, number: int, serving: dict[Arc, list[int]]) -> None:
        """Let what the forward gathered also serve the backward if it is kept."""
        targets, earlier = self.transitions.targets, self.factor_graph.values[number].gathered_in_forward
        for (source, target), columns in serving.items():
            layout = targets[number][target]
            if layout not in targets[earlier]:
                continue
            gathered = self.moved[earlier].get((source, targets[earlier].index(layout)))
            if gathered is None:
                continue
            keep = self.program.column()
            self.keeps[keep] = number
            self._row([(gathered, 1.0), (keep, -1.0)], 0.0)
            self._hold(keep, float(self.transitions.terms[number].moved[target]))
            columns.append(keep)

    def _balance(self, flow: dict[Arc, int], side: int, at: Ints, picks: dict[int, int]) -> None:
        """Require as much flow out of (into) a layout as the strategies that give (need) it."""
        groups: dict[int, Terms] = {}
        for strategy, column in picks.items():
            groups.setdefault(int(at[strategy]), []).append((column, -1.0))
        for arc, column in flow.items():
            if arc[side] in groups:
                groups[arc[side]].append((column, 1.0))
            else:
                self.program.upper[column] = 0.0
        for terms in groups.values():
            self._row(terms, 0.0, 0.0)

    # --- memory

    def _add_memory(self, budget: MemoryBudget) -> None:
        """Limit the memory, in GB: persistent bytes, the most that one call works on, and the most that one layer
        gathers."""
        working, gathered = (self.program.column(0.0, float("inf")) for _ in range(2))
        self.bytes += [(working, GB), (gathered, GB)]
        for variable, columns in zip(self.factor_graph.variables, self.picks, strict=True):
            entries = [(column, -float(variable.working[strategy]) / GB) for strategy, column in columns.items()]
            self.working_rows.append(self._row([(working, 1.0), *entries], 0.0))
        for terms in self.gathered:
            entries = [(column, -nbytes / GB) for column, nbytes in terms]
            self.gathered_rows.append(self._row([(gathered, 1.0), *entries], 0.0))
        stays = [(column, -nbytes / GB) for column, nbytes in self.bytes]
        stays += [(column, 1.0) for column in add_recomputation(self.program, budget)]
        self.byte_row = self._row(stays, -(budget.limit - self.factor_graph.base) / GB)

    # --- entries

    def _row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float = float("inf")) -> int:
        return self.program.row([column for column, _ in terms], [entry for _, entry in terms], lower, upper)

    def _load(self, segment: int, resource: int, column: int, seconds: float) -> None:
        if seconds:
            self.loads[segment][resource].append((column, seconds))

    def _hold(self, column: int, nbytes: float) -> None:
        if nbytes:
            self.bytes.append((column, nbytes))


def _sum(values: Floats, terms: Terms) -> float:
    found: float = sum(values[column] * entry for column, entry in terms)
    return found
