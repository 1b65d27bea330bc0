"""Evaluate the plan of a recipe by the search's objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.fx import GraphModule, Node

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
    returned,
)
from passes.ir.layout import Layout
from passes.search.model.factor_graph import FactorGraph, Port
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.skeleton import Skeleton
from passes.search.model.transitions import Transitions
from passes.search.solvers.evaluate import Assignment, evaluate


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
    strategies = _most_alike(gm, skeleton, transitions.factor_graph, placed)
    return evaluate(transitions, strategies, keeps=float("inf") if gathers_again else 0.0, repeats=0.0, budget=budget)


def _most_alike(gm: GraphModule, skeleton: Skeleton, graph: FactorGraph, placed: GraphModule) -> list[int]:
    """Return, per variable, the strategy that agrees with `placed` on most bytes of the values around it."""
    there = {key: node for node, key in _keys(placed).items()}
    made: dict[Port, Layout] = {}
    needed: dict[Port, Layout] = {}
    for node, key in _keys(gm).items():
        if node not in skeleton.owners or key not in there or not has_layout(there[key]):
            continue
        owner, other = skeleton.owners[node], there[key]
        made |= {Port(owner.variable, owner.results + i): layout for i, layout in enumerate(layouts_of(other))}
        if node.op == "call_function" and has_needs(other):
            needed |= {Port(owner.variable, owner.needs + i): layout for i, layout in enumerate(needs_of(other))}
    agreed = [np.zeros(len(variable.strategies)) for variable in graph.variables]
    for value in graph.values:
        nbytes = math.prod(value.shape) * value.itemsize * value.count
        if value.maker in made:
            strategies = graph.variables[value.maker.variable].strategies
            results = [strategy.results[value.maker.slot] for strategy in strategies]
            agreed[value.maker.variable] += [nbytes * _likeness(layout, made[value.maker]) for layout in results]
        for user in value.users:
            if user in needed:
                needs = [strategy.needs[user.slot] for strategy in graph.variables[user.variable].strategies]
                agreed[user.variable] += [nbytes * _likeness(layout, needed[user]) for layout in needs]
    return [int(counts.argmax()) for counts in agreed]


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
