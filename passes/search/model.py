"""The mixed-integer program of a problem, of the choices that were not struck.

Columns: a choice per variable; per value and user, what of which layout becomes which (a flow); what moves at all,
at least each user's flow. Per segment its time, at least its computation with the moves that cannot hide, and at
least what each link carries. Bytes of parameters and of what is saved for the backward are one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.search.bound import Left
from passes.search.milp import Program
from passes.search.problem import Busy, Floats, Ints, Move, Problem, Value
from passes.search.relax import Weights
from passes.search.room import Room
from passes.search.sides import Arc, Sides

SCALE = 1e3  # seconds to the program's unit: milliseconds
TIE = 1e-4  # of a move's seconds: of plans as quick as each other the one that moves less
COMPUTE, INSIDE, ACROSS = range(3)  # as in Busy

@dataclass(frozen=True)
class Plan:
    """The number of each variable's choice; `kept` are values (numbers) whose moves are kept from the forward, `again`
    those that move once more in the backward.

    Objective and bound in seconds, `memory` in bytes, `busy` [segment, computation and links] in seconds.
    """

    picked: list[int]
    kept: list[int]
    again: list[int]
    objective: float
    bound: float
    memory: float
    busy: Floats


class Model:
    """The program of what is left to look at."""

    def __init__(self, sides: Sides, left: Left, room: Room | None) -> None:
        self.problem, self.sides, self.room = sides.problem, sides, room
        problem = self.problem
        self.program = Program()
        self.total = [self.program.column(SCALE, float("inf")) for _ in problem.segments]
        self.busy: list[list[list[tuple[int, float]]]] = [[[], [], []] for _ in problem.segments]
        self.bytes: list[tuple[int, float]] = []
        self.gathered: list[list[tuple[int, float]]] = [[] for _ in problem.segments]
        self.picks = [self._choices(number, np.flatnonzero(choices).tolist()) for number, choices in enumerate(left.choices)]
        self.moved: list[dict[Arc, int]] = []
        self.keeps: dict[int, int] = {}  # column -> value
        self.repeats: dict[int, int] = {}  # column -> value
        for number in range(len(problem.values)):
            self._value(number, left.moves[number])
        self.time_rows = [
            [
                self._row([(self.total[segment], 1.0), *((column, -seconds) for column, seconds in row)], 0.0)
                for row in rows
            ]
            for segment, rows in enumerate(self.busy)
        ]
        self.byte_row = -1
        self.work_rows: list[int] = []  # per variable
        self.buffer_rows: list[int] = []  # per segment
        if room is not None:
            self._work()
            terms = [(column, -nbytes / 1e9) for column, nbytes in self.bytes]
            terms += [(column, 1.0) for column in freed(self.program, room)]
            self.byte_row = self._row(terms, -(room.limit - problem.base) / 1e9)

    @property
    def size(self) -> int:
        """Columns."""
        return len(self.program.costs)

    def _work(self) -> None:
        """What one call holds, and what one layer's parameters take as it uses them: the most of each, in GB."""
        work, buffer = (self.program.column(0.0, float("inf")) for _ in range(2))
        self.bytes += [(work, 1e9), (buffer, 1e9)]
        for variable, columns in zip(self.problem.variables, self.picks, strict=True):
            held = [(column, -float(variable.held[choice]) / 1e9) for choice, column in columns.items()]
            self.work_rows.append(self._row([(work, 1.0), *held], 0.0))
        for rows in self.gathered:
            terms = [(column, -nbytes / 1e9) for column, nbytes in rows]
            self.buffer_rows.append(self._row([(buffer, 1.0), *terms], 0.0))

    def _row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float = float("inf")) -> int:
        return self.program.row([column for column, _ in terms], [entry for _, entry in terms], lower, upper)

    def _choices(self, number: int, alive: list[int]) -> dict[int, int]:
        variable = self.problem.variables[number]
        columns = {choice: self.program.column(integer=True) for choice in alive}
        self._row([(column, 1.0) for column in columns.values()], 1.0, 1.0)
        for choice, column in columns.items():
            self._add(variable.segment, COMPUTE, column, float(variable.seconds[choice]))
            self._hold(column, float(variable.state[choice]))
        return columns

    def _add(self, segment: int, what: int, column: int, seconds: float) -> None:
        if seconds:
            self.busy[segment][what].append((column, seconds))

    def _hold(self, column: int, nbytes: float) -> None:
        if nbytes:
            self.bytes.append((column, nbytes))

    def _value(self, number: int, open_: NDArray[np.bool_]) -> None:
        value = self.problem.values[number]
        moves = self._moves(number, np.any(open_, axis=0))
        columns = {arc: self.program.column(TIE * SCALE * move.total * value.count) for arc, move in moves.items()}
        self.moved.append(columns)
        for arc, move in moves.items():
            self._charge(value, columns[arc], move)
        self._hold_moved(value, number, columns, moves)
        served = self._kept(number, columns) if value.again >= 0 else {arc: [column] for arc, column in columns.items()}
        alone, same = len(value.uses) == 1 and value.again < 0, self.sides.tariffs[number].same
        for user, slot in enumerate(self.sides.users[number]):
            flow: dict[Arc, int] = {}
            for source, target in np.argwhere(open_[user]).tolist():
                arc = source, target
                if same[arc]:
                    flow[arc] = self.program.column()
                elif arc in columns and alone:
                    flow[arc] = columns[arc]
                elif arc in columns:
                    flow[arc] = self.program.column()
                    self._row([*((column, 1.0) for column in served[arc]), (flow[arc], -1.0)], 0.0)
            maker = self.sides.makers[number]
            self._balance(flow, 0, maker.at, self.picks[maker.variable])
            self._balance(flow, 1, slot.at, self.picks[slot.variable])

    def _moves(self, number: int, open_: NDArray[np.bool_]) -> dict[Arc, Move]:
        tariff = self.sides.tariffs[number]
        fares = tariff.fares
        arcs = np.argwhere(open_ & ~tariff.same & ~fares.never)
        at = arcs[:, 0], arcs[:, 1]
        columns = zip(fares.inside[at].tolist(), fares.across[at].tolist(), fares.local[at].tolist(), strict=True)
        return {(source, target): Move(*one) for (source, target), one in zip(arcs.tolist(), columns, strict=True)}

    def _charge(self, value: Value, column: int, move: Move) -> None:
        for what, seconds in enumerate(charged(self.problem, value, move)):
            self._add(value.segment, what, column, seconds)

    def _hold_moved(self, value: Value, number: int, columns: dict[Arc, int], moves: dict[Arc, Move]) -> None:
        tariff = self.sides.tariffs[number]
        for arc, column in columns.items():
            if value.is_parameter:
                nbytes = float(tariff.moved[arc[1]])
                self.gathered[value.segment].append((column, nbytes / self.problem.segments[value.segment].layers))
            elif nbytes := float(tariff.held[arc]):
                self._hold(column, nbytes)
                if value.backward >= 0 and self.room is not None:
                    self._repeat(value, number, column, moves[arc], nbytes)

    def _repeat(self, value: Value, number: int, moved: int, move: Move, nbytes: float) -> None:
        """Moving again in the backward instead of keeping."""
        column = self.program.column(TIE * SCALE * move.total * value.count)
        self.repeats[column] = number
        self._row([(moved, 1.0), (column, -1.0)], 0.0)
        self._hold(column, -nbytes)
        for what, seconds in enumerate(repeated(self.problem, value, move)):
            self._add(value.backward, what, column, seconds)

    def _kept(self, number: int, columns: dict[Arc, int]) -> dict[Arc, list[int]]:
        """What serves the backward: a move of its own, or what the forward moved, if it is kept."""
        value = self.problem.values[number]
        sides, earlier = self.sides, value.again
        served = {}
        for (source, target), column in columns.items():
            layout = sides.targets[number][target]
            served[source, target] = [column]
            if layout not in sides.targets[earlier]:
                continue
            before = self.moved[earlier].get((source, sides.targets[earlier].index(layout)))
            if before is None:
                continue
            keep = self.program.column()
            self.keeps[keep] = number
            self._row([(before, 1.0), (keep, -1.0)], 0.0)
            self._hold(keep, float(sides.tariffs[number].moved[target]))
            served[source, target].append(keep)
        return served

    def _balance(self, flow: dict[Arc, int], side: int, at: Ints, picks: dict[int, int]) -> None:
        """Flows out of (into) a layout are as much as the choices that give (need) it."""
        groups: dict[int, list[tuple[int, float]]] = {}
        for choice, column in picks.items():
            groups.setdefault(int(at[choice]), []).append((column, -1.0))
        for arc, column in flow.items():
            if arc[side] in groups:
                groups[arc[side]].append((column, 1.0))
            else:
                self.program.upper[column] = 0.0
        for terms in groups.values():
            self._row(terms, 0.0, 0.0)

    def weights(self, time_limit: float | None) -> Weights | None:
        """What a segment's computation and links, and a byte, are worth where choices may be mixed; None where no
        mixture fits, or in time."""
        duals = self.program.duals(time_limit=time_limit)
        if duals is None:
            return None
        segments = []
        for rows in self.time_rows:
            worth = [max(0.0, float(duals[row])) for row in rows]
            total = sum(worth)
            segments.append((worth[0] / total, worth[1] / total, worth[2] / total) if total else (1.0, 0.0, 0.0))
        if self.byte_row < 0:
            return Weights(tuple(segments))
        bytes_ = [[max(0.0, float(duals[row])) / SCALE / 1e9 for row in rows] for rows in (self.work_rows, self.buffer_rows)]
        byte = max(0.0, float(duals[self.byte_row])) / SCALE / 1e9
        return Weights(tuple(segments), max(byte, *map(sum, bytes_)), *map(tuple, bytes_))

    def solve(self, gap: float, time_limit: float | None, nodes: int | None = None) -> tuple[Plan | None, float]:
        """The best plan found, None where none was; and what no plan is better than, in seconds."""
        answer = self.program.minimise(gap=gap, time_limit=time_limit, nodes=nodes)
        # The program's cost has the ties: less than three times their part of a segment, which is the longest of three.
        bound = float("inf") if answer.is_infeasible else answer.bound / SCALE / (1 + 3 * TIE)
        if answer.values is None:
            return None, bound
        values = answer.values
        picked = [max(columns, key=lambda choice: values[columns[choice]]) for columns in self.picks]
        busy = np.array([[sum(values[c] * s for c, s in row) for row in rows] for rows in self.busy])
        memory = self.problem.base + float(sum(values[column] * nbytes for column, nbytes in self.bytes))
        kept = sorted({value for column, value in self.keeps.items() if values[column] > 0.5})
        again = sorted({value for column, value in self.repeats.items() if values[column] > 0.5})
        objective = float(busy.max(1).sum()) + (self.room.seconds(memory) if self.room is not None else 0.0)
        return Plan(picked, kept, again, objective, bound, memory, busy), bound


def freed(program: Program, room: Room) -> list[int]:
    """Columns of what is computed again, in GB."""
    return [program.column(step.seconds * 1e9 * SCALE, step.nbytes / 1e9) for step in room.relief]


def charged(problem: Problem, value: Value, move: Move) -> Busy:
    """Seconds that a move adds to its segment: to its links, and in front of computation where it cannot hide."""
    waits = problem.segments[value.segment].exposed if value.hides else 1.0
    on_path = move.local + waits * (move.inside + move.across)
    return on_path * value.count, move.inside * value.count, move.across * value.count


def repeated(problem: Problem, value: Value, move: Move) -> Busy:
    """Seconds that a move adds to the backward when it is made again there: it hides, as nothing is made for it."""
    on_path = problem.segments[value.backward].exposed * (move.inside + move.across)
    return on_path * value.count, move.inside * value.count, move.across * value.count
