"""Add to a mixed-integer program the columns of strategies and transitions, and the flow of each user through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.search.model.factor_graph import FORWARD_END, MOMENTS, RESOURCES, Bools, Ints, Value
from passes.search.model.objective import TransitionTerms
from passes.search.model.transitions import Arc, Transitions
from passes.search.solvers.highs import MILLISECONDS, MixedIntegerProgram
from passes.search.solvers.restriction import Restriction

TIE = 1e-4  # of a transition's seconds: of assignments that are equally quick, prefer the one that communicates less

Terms = list[tuple[int, float]]  # columns and their entries


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a program under construction, and the sums that they go into."""

    program: MixedIntegerProgram
    loads: list[list[Terms]]  # per segment and resource, seconds
    gathered: list[Terms]  # per segment, bytes
    bytes: list[Terms] = field(default_factory=lambda: [[] for _ in MOMENTS])  # per moment
    picks: list[dict[int, int]] = field(default_factory=list)  # per variable, of its strategies
    moved: list[dict[Arc, int]] = field(default_factory=list)  # per value, of its transitions
    keeps: dict[int, int] = field(default_factory=dict)  # column -> value
    repeats: dict[int, int] = field(default_factory=dict)  # column -> value

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float = float("inf")) -> int:
        return self.program.row([column for column, _ in terms], [entry for _, entry in terms], lower, upper)

    def load(self, segment: int, resource: int, column: int, seconds: float) -> None:
        if seconds:
            self.loads[segment][resource].append((column, seconds))

    def hold(self, column: int, nbytes: float, moment: int = FORWARD_END) -> None:
        if nbytes:
            self.bytes[moment].append((column, nbytes))


def add_columns(
    program: MixedIntegerProgram, transitions: Transitions, restriction: Restriction, *, repeats: bool
) -> Columns:
    """Add what a restriction leaves; `repeats`: transitions may be repeated in the backward, to keep less memory."""
    segments = transitions.factor_graph.segments
    made = Columns(program, [[[] for _ in RESOURCES] for _ in segments], [[] for _ in segments])
    for number, strategies in enumerate(restriction.strategies):
        _add_variable(made, transitions, number, np.flatnonzero(strategies).tolist())
    for number, open_ in enumerate(restriction.transitions):
        _add_value(made, transitions, number, open_, repeats=repeats)
    return made


def _add_variable(made: Columns, transitions: Transitions, number: int, alive: list[int]) -> None:
    variable = transitions.factor_graph.variables[number]
    columns = {strategy: made.program.column(integer=True) for strategy in alive}
    made.picks.append(columns)
    made.row([(column, 1.0) for column in columns.values()], 1.0, 1.0)
    for strategy, column in columns.items():
        for resource, seconds in enumerate(variable.loads[:, strategy].tolist()):
            made.load(variable.segment, resource, column, seconds)
        for moment in MOMENTS:
            made.hold(column, float(variable.state[moment, strategy]), moment)


def _add_value(made: Columns, transitions: Transitions, number: int, open_: Bools, *, repeats: bool) -> None:
    """Add the transitions of a value, and the flow of each user through them."""
    value, terms = transitions.factor_graph.values[number], transitions.terms[number]
    columns = _add_transitions(made, transitions, number, np.any(open_, axis=0), repeats=repeats)
    serving = {arc: [column] for arc, column in columns.items()}
    if value.gathered_in_forward >= 0:
        _add_keeps(made, transitions, number, serving)
    is_only_user = len(value.users) == 1 and value.gathered_in_forward < 0
    for user, endpoint in enumerate(transitions.users[number]):
        flow: dict[Arc, int] = {}
        for source, target in np.argwhere(open_[user]).tolist():
            arc = source, target
            if terms.same[arc]:
                flow[arc] = made.program.column()
            elif arc in columns and is_only_user:
                flow[arc] = columns[arc]
            elif arc in columns:
                flow[arc] = made.program.column()
                made.row([*((column, 1.0) for column in serving[arc]), (flow[arc], -1.0)], 0.0)
        maker = transitions.makers[number]
        _balance(made, flow, 0, maker.at, made.picks[maker.variable])
        _balance(made, flow, 1, endpoint.at, made.picks[endpoint.variable])


def _add_transitions(
    made: Columns, transitions: Transitions, number: int, open_: Bools, *, repeats: bool
) -> dict[Arc, int]:
    value, terms = transitions.factor_graph.values[number], transitions.terms[number]
    arcs: list[Arc] = [(s, t) for s, t in np.argwhere(open_ & ~terms.same & ~terms.impossible).tolist()]
    columns = {arc: _transition_column(made, terms, arc) for arc in arcs}
    made.moved.append(columns)
    for (source, target), column in columns.items():
        for resource, seconds in enumerate(terms.loads[:, source, target].tolist()):
            made.load(value.segment, resource, column, seconds)
    for arc, column in columns.items():
        if value.is_parameter:
            made.gathered[value.segment].append((column, float(terms.gathered[arc])))
        made.hold(column, float(terms.held[arc]))
        if terms.held[arc] and terms.repeats[arc] and repeats:
            _add_repeat(made, terms, number, value, arc, column)
    return columns


def _transition_column(made: Columns, terms: TransitionTerms, arc: Arc) -> int:
    return made.program.column(TIE * MILLISECONDS * float(terms.seconds[arc]))


def _add_repeat(made: Columns, terms: TransitionTerms, number: int, value: Value, arc: Arc, transition: int) -> None:
    """Let a transition be repeated in the backward instead of keeping its result."""
    column = _transition_column(made, terms, arc)
    made.repeats[column] = number
    made.row([(transition, 1.0), (column, -1.0)], 0.0)
    made.hold(column, -float(terms.held[arc]))
    for resource, seconds in enumerate(terms.repeat_loads[:, arc[0], arc[1]].tolist()):
        made.load(value.repeat_segment, resource, column, seconds)


def _add_keeps(made: Columns, transitions: Transitions, number: int, serving: dict[Arc, list[int]]) -> None:
    """Let what the forward gathered also serve the backward if it is kept."""
    targets, earlier = transitions.targets, transitions.factor_graph.values[number].gathered_in_forward
    for (source, target), columns in serving.items():
        layout = targets[number][target]
        if layout not in targets[earlier]:
            continue
        gathered = made.moved[earlier].get((source, targets[earlier].index(layout)))
        if gathered is None:
            continue
        keep = made.program.column()
        made.keeps[keep] = number
        made.row([(gathered, 1.0), (keep, -1.0)], 0.0)
        made.hold(keep, float(transitions.terms[number].moved[target]))
        columns.append(keep)


def _balance(made: Columns, flow: dict[Arc, int], side: int, at: Ints, picks: dict[int, int]) -> None:
    """Require as much flow out of (into) a layout as the strategies that give (need) it."""
    groups: dict[int, Terms] = {}
    for strategy, column in picks.items():
        groups.setdefault(int(at[strategy]), []).append((column, -1.0))
    for arc, column in flow.items():
        if arc[side] in groups:
            groups[arc[side]].append((column, 1.0))
        else:
            made.program.upper[column] = 0.0
    for terms in groups.values():
        made.row(terms, 0.0, 0.0)
