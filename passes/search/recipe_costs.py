"""Evaluate the plan of a recipe by the search's objective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.fx import GraphModule, Node

from passes.cost.fused_regions import tensor_nbytes
from passes.ir.graph import (
    has_layout,
    has_needs,
    input_of,
    is_reshard,
    layouts_of,
    needs_of,
    note_of,
    operands,
    outputs_of,
    placeholders,
    results_of,
    returned,
    tensor_of,
)
from passes.ir.layout import Layout
from passes.search.model.factor_graph import FactorGraph, Floats, Variable
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.skeleton import Skeleton
from passes.search.model.transitions import INFEASIBLE, Transitions
from passes.search.solvers.evaluate import Assignment, evaluate

SWEEPS = 2  # over the calls that cannot be as in a recipe, until the fastest strategies are chosen


def recipe_assignment(
    gm: GraphModule,
    skeleton: Skeleton,
    transitions: Transitions,
    placed: GraphModule,
    *,
    gathers_again: bool,
    budget: MemoryBudget | None,
) -> Assignment | None:
    """Return the assignment with the layouts of `placed`: the graph `gm` with reshards added and every node placed.

    Layouts that the search does not consider are replaced by the most similar ones; None if these cannot be combined.
    """
    strategies, unlike = _most_alike(gm, skeleton, transitions.factor_graph, placed)
    _descend(transitions, strategies, unlike)
    return evaluate(transitions, strategies, keeps=float("inf") if gathers_again else 0.0, repeats=0.0, budget=budget)


def _most_alike(
    gm: GraphModule, skeleton: Skeleton, graph: FactorGraph, placed: GraphModule
) -> tuple[list[int], list[int]]:
    """Return, per variable, the strategy that agrees with `placed` on most bytes of its operands and results, and the
    variables that do not agree on all.
    """
    there = {key: node for node, key in _keys(placed).items()}
    most = [0] * len(graph.variables)
    agreed = [np.zeros(len(variable.strategies)) for variable in graph.variables]
    for node, key in _keys(gm).items():
        if node not in skeleton.owners or key not in there or not has_layout(there[key]):
            continue
        owner, other = skeleton.owners[node], there[key]
        strategies, found = graph.variables[owner.variable].strategies, agreed[owner.variable]
        for slot, (tensor, layout) in enumerate(zip(results_of(node), layouts_of(other), strict=True), owner.results):
            found += [tensor_nbytes(tensor) * _likeness(one.results[slot], layout) for one in strategies]
            most[owner.variable] += tensor_nbytes(tensor) * len(layout.placements)
        if node.op == "call_function" and has_needs(other):
            for slot, (operand, need) in enumerate(zip(operands(node), needs_of(other), strict=True), owner.needs):
                found += [tensor_nbytes(tensor_of(operand)) * _likeness(one.needs[slot], need) for one in strategies]
                most[owner.variable] += tensor_nbytes(tensor_of(operand)) * len(need.placements)
    unlike = [number for number, counts in enumerate(agreed) if counts.max() < most[number]]
    return [int(counts.argmax()) for counts in agreed], unlike


def _descend(transitions: Transitions, strategies: list[int], unlike: Sequence[int]) -> None:
    """Change the strategies of calls that are `unlike` the recipe, and of their neighbours, to the fastest beside the others."""
    variables, around = transitions.factor_graph.variables, _around(transitions)
    near = [edge.other(transitions) for number in unlike for edge in around[number]]
    free = [number for number in dict.fromkeys((*unlike, *near)) if _is_call(variables[number])]
    waiting = set(free)  # until a call has its strategy, its neighbours count on the best for them
    for number in free * SWEEPS:
        costs = variables[number].seconds.copy()
        for edge in around[number]:
            seconds = edge.seconds(transitions)
            other = edge.other(transitions)
            costs += seconds.min(1) if other in waiting else seconds[:, strategies[other]]
        strategies[number] = int(costs.argmin())
        waiting.discard(number)


def _is_call(variable: Variable) -> bool:
    return bool(variable.nodes) and variable.nodes[0].op == "call_function"


@dataclass(frozen=True)
class _Edge:
    """A value between a call and another, at its maker (`from_maker`) or at a user."""

    value: int
    user: int
    from_maker: bool

    def other(self, transitions: Transitions) -> int:
        """Return the variable at the other end."""
        return transitions.users[self.value][self.user].variable if self.from_maker else transitions.makers[self.value].variable

    def seconds(self, transitions: Transitions) -> Floats:
        """Return the seconds of the transition, per strategy of the call and of the other."""
        terms = transitions.terms[self.value]
        maker, user = transitions.makers[self.value], transitions.users[self.value][self.user]
        by_layout = np.where(terms.impossible, INFEASIBLE, np.where(terms.same, 0.0, terms.seconds))
        found: Floats = by_layout[np.ix_(maker.at, user.at)]
        return found if self.from_maker else found.T


def _around(transitions: Transitions) -> list[list[_Edge]]:
    """Return the edges at each variable."""
    found: list[list[_Edge]] = [[] for _ in transitions.factor_graph.variables]
    for value, (maker, users) in enumerate(zip(transitions.makers, transitions.users, strict=True)):
        for number, user in enumerate(users):
            found[maker.variable].append(_Edge(value, number, from_maker=True))
            found[user.variable].append(_Edge(value, number, from_maker=False))
    return found


@lru_cache(maxsize=1 << 16)
def _likeness(one: Layout, other: Layout) -> int:
    """Count the axes on which two layouts are the same."""
    return sum(a == b for a, b in zip(one.placements, other.placements, strict=True))


def _keys(gm: GraphModule) -> dict[Node, str]:
    """Return names of nodes that are the same with and without reshards: casts are named by their parameter or output."""
    keys = {node: node.name for node in gm.graph.nodes if not is_reshard(node)}
    for node in placeholders(gm.graph):
        casts = [user for user in _users(node) if user.op == "call_function" and note_of(user)]
        keys |= {cast: f"{input_of(node).name}#{number}" for number, cast in enumerate(casts)}
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        number = 0
        while isinstance(value, Node) and value.op == "call_function" and note_of(value) and len(operands(value)) == 1:
            if not is_reshard(value):
                keys[value] = f"{output.name}#-{number}"
                number += 1
            value = operands(value)[0]
    return keys


def _users(node: Node) -> Iterator[Node]:
    """Yield the users of a value, also those that take it through a reshard."""
    for user in node.users:
        if is_reshard(user):
            yield from _users(user)
        else:
            yield user
