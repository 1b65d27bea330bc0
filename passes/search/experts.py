"""What an expert's plan costs by the model of the search: layouts that were found without it."""

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
from passes.search.draft import Built
from passes.search.evaluate import evaluate
from passes.search.model import Plan
from passes.search.problem import Use
from passes.search.room import Room
from passes.search.sides import Sides


def price(
    gm: GraphModule, built: Built, sides: Sides, placed: GraphModule, *, gathers_again: bool, room: Room | None
) -> Plan | None:
    """The plan with the layouts of `placed`: the graph `gm` that `built` is of, with reshards added and every node
    placed. Where it has layouts that the search does not consider, with those that are most like it; None where these do
    not go together."""
    picked = _picked(gm, built, placed)
    return evaluate(sides, picked, keeps=float("inf") if gathers_again else 0.0, repeats=0.0, room=room)


def _picked(gm: GraphModule, built: Built, placed: GraphModule) -> list[int]:
    """Per variable, the choice that agrees with `placed` on most bytes of what it has in common with others."""
    there = {key: node for node, key in _keys(placed).items()}
    made: dict[Use, Layout] = {}
    needed: dict[Use, Layout] = {}
    for node, key in _keys(gm).items():
        if node not in built.owners or key not in there or not has_layout(there[key]):
            continue
        owner, other = built.owners[node], there[key]
        made |= {Use(owner.variable, owner.results + i): layout for i, layout in enumerate(layouts_of(other))}
        if node.op == "call_function" and has_needs(other):
            needed |= {Use(owner.variable, owner.needs + i): layout for i, layout in enumerate(needs_of(other))}
    problem = built.problem
    agreed = [np.zeros(len(variable.choices)) for variable in problem.variables]
    for value in problem.values:
        nbytes = math.prod(value.shape) * value.itemsize * value.count
        if value.maker in made:
            results = [choice.results[value.maker.slot] for choice in problem.variables[value.maker.variable].choices]
            agreed[value.maker.variable] += [nbytes * _likeness(layout, made[value.maker]) for layout in results]
        for use in value.uses:
            if use in needed:
                needs = [choice.needs[use.slot] for choice in problem.variables[use.variable].choices]
                agreed[use.variable] += [nbytes * _likeness(layout, needed[use]) for layout in needs]
    return [int(counts.argmax()) for counts in agreed]


@lru_cache(maxsize=1 << 16)
def _likeness(one: Layout, other: Layout) -> int:
    """Axes on which two layouts are the same."""
    return sum(a == b for a, b in zip(one.placements, other.placements, strict=True))


def _keys(gm: GraphModule) -> dict[Node, str]:
    """Names of nodes that are the same with and without reshards: casts are told by their parameter or output."""
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
    """Users of a value, whatever layout they take it in."""
    for user in node.users:
        if is_reshard(user):
            yield from _users(user)
        else:
            yield user
