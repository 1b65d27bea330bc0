"""A factor graph without costs, which is the same on all hardware, and its costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from passes.search.model.axis_groups import AxisGroups
from passes.search.model.factor_graph import (
    FORWARD_END,
    LINKS,
    MOMENTS,
    FactorGraph,
    Floats,
    Ints,
    Port,
    Segment,
    Value,
    Variable,
)
from passes.search.model.node_costs import NodeCosts
from passes.search.model.strategies import Strategy


@dataclass(frozen=True)
class Owner:
    """The variable that decides about a node, and the slots of its first result and operand in the strategies."""

    variable: int
    results: int = 0
    needs: int = 0


@dataclass(frozen=True, eq=False)
class Member:
    """A node of a variable, for itself and all that are tied to it.

    `numbers` are of its strategies, per strategy of the variable; None: the same numbers.
    """

    node: Node
    strategies: tuple[Strategy, ...]
    numbers: Ints | None
    count: int  # nodes of the whole model
    is_saved: bool  # its results stay for the backward
    is_awaited: bool  # it does not lead to one gradient alone
    outer: float  # the part of these nodes that is of a backward's first layer, or of a forward's last


@dataclass(frozen=True, eq=False)
class VariableSkeleton:
    """A variable without costs. One without nodes stands for outputs only: it needs layouts and costs nothing."""

    nodes: tuple[Node, ...]
    strategies: tuple[Strategy, ...]
    segment: int
    members: tuple[Member, ...]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A factor graph without costs, and how strategies of its variables are written into the graph of the program."""

    variables: tuple[VariableSkeleton, ...]
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    leader: Mapping[Node, Node]  # the first of the nodes that are tied to each
    owners: Mapping[Node, Owner]  # of leaders
    ends: Mapping[int, Port]  # position in the graph's output -> the operand that it is
    axis_groups: AxisGroups


def with_costs(skeleton: Skeleton, node_costs: NodeCosts, deadline: float) -> FactorGraph:
    """Return the factor graph with the costs of strategies. Raises TimeoutError past `deadline` (by `time.perf_counter`)."""
    variables = []
    for one in skeleton.variables:
        if time.perf_counter() > deadline:
            raise TimeoutError
        name = one.nodes[0].name if one.nodes else "outputs"
        seconds, outer, awaited, state, working = _costs(one, node_costs)
        loads = skeleton.segments[one.segment].loads_of_calls(seconds, outer, awaited)
        variables.append(Variable(name, one.nodes, one.strategies, one.segment, loads, state, working))
    return FactorGraph(tuple(variables), skeleton.values, skeleton.segments)


def _costs(variable: VariableSkeleton, node_costs: NodeCosts) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return, per strategy, seconds [of calls, of each link, strategy], those of `Member.outer`, those of calls that others wait
    for, bytes that stay and bytes of one node while it runs."""
    if not variable.members:
        number = len(variable.strategies)
        nothing = np.zeros((1 + len(LINKS), number))
        return nothing, nothing, np.zeros(number), np.zeros((len(MOMENTS), number)), np.zeros(number)
    costs = [member_costs(member, node_costs) for member in variable.members]
    seconds, state, working = (np.array([one[row] for one in costs]) for row in range(3))
    awaited = np.array([[member.is_awaited] for member in variable.members])
    outer = np.array([[[member.outer]] for member in variable.members])
    return seconds.sum(0), (seconds * outer).sum(0), (seconds[:, 0] * awaited).sum(0), state.sum(0), working.max(0)


def member_costs(member: Member, node_costs: NodeCosts) -> list[Floats]:
    """Return, per strategy of its variable, seconds [of calls, of each link, strategy], bytes that stay [moment, strategy] and
    bytes while it runs."""
    seconds, state, results, working = node_costs.costs(member.node, member.strategies)
    if member.is_saved:
        state = state.copy()
        state[FORWARD_END] += results
    costs = seconds * member.count, state * member.count, working
    return [row if member.numbers is None else row[..., member.numbers] for row in costs]
