"""The problem of a graph's layouts before anything has a price: the same on all hardware."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from passes.search.bundles import Bundles
from passes.search.choices import Choice
from passes.search.kernels import Kernels
from passes.search.problem import Floats, Ints, Problem, Segment, Use, Value, Variable


@dataclass(frozen=True)
class Owner:
    """The variable that decides about a node, and the slots of its first result and operand in the choices."""

    variable: int
    results: int = 0
    needs: int = 0


@dataclass(frozen=True, eq=False)
class Part:
    """A node of a variable, and those tied to it. `numbers` are of its choice, per choice of the variable; None: the same."""

    node: Node
    choices: tuple[Choice, ...]
    numbers: Ints | None
    count: int
    is_saved: bool  # its results stay for the backward


@dataclass(frozen=True, eq=False)
class Undecided:
    """A variable without costs. One without nodes is of outputs alone: it needs layouts, and costs nothing by itself."""

    nodes: tuple[Node, ...]
    choices: tuple[Choice, ...]
    segment: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Draft:
    """A problem without costs, and how its variables' choices are written into the graph."""

    variables: tuple[Undecided, ...]
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    first: Mapping[Node, Node]
    owners: Mapping[Node, Owner]
    ends: Mapping[int, Use]  # position in the graph's output -> the operand that it is
    bundles: Bundles


@dataclass(frozen=True)
class Built:
    """The problem, and how its variables' choices are written into the graph. Nodes are looked up by their first tied."""

    problem: Problem
    first: Mapping[Node, Node]
    owners: Mapping[Node, Owner]
    ends: Mapping[int, Use]  # position in the graph's output -> the operand that it is


def priced(draft: Draft, kernels: Kernels, deadline: float) -> Built:
    """The problem with what each choice costs. Raises TimeoutError past `deadline` (by `time.perf_counter`)."""
    variables = []
    for one in draft.variables:
        if time.perf_counter() > deadline:
            raise TimeoutError
        name = one.nodes[0].name if one.nodes else "outputs"
        variables.append(Variable(name, one.nodes, one.choices, one.segment, *_costs(one, kernels)))
    problem = Problem(tuple(variables), draft.values, draft.segments)
    return Built(problem, draft.first, draft.owners, draft.ends)


def _costs(variable: Undecided, kernels: Kernels) -> tuple[Floats, Floats, Floats]:
    """Per choice: seconds, bytes that stay, bytes of one node while it runs."""
    if not variable.parts:
        return np.zeros(len(variable.choices)), np.zeros(len(variable.choices)), np.zeros(len(variable.choices))
    costs = [_part_costs(part, kernels) for part in variable.parts]
    seconds, state, held = (np.array([one[row] for one in costs]) for row in range(3))
    return seconds.sum(0), state.sum(0), held.max(0)


def _part_costs(part: Part, kernels: Kernels) -> list[Floats]:
    seconds, state, results, held = kernels.costs(part.node, part.choices)
    costs = seconds * part.count, (state + results if part.is_saved else state) * part.count, held
    return [row if part.numbers is None else row[part.numbers] for row in costs]
