"""What the search would say of layouts that were found without it: an expert's plan, by the same model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.fx import GraphModule, Node

from passes.ir.graph import (
    has_layout,
    has_needs,
    input_of,
    is_recompute,
    is_reshard,
    layouts_of,
    needs_of,
    note_of,
    operands,
    outputs_of,
    placeholders,
    results_of,
    returned,
)
from passes.search.build import Built
from passes.search.model import ACROSS, COMPUTE, INSIDE
from passes.search.prices import Prices
from passes.search.problem import Floats, Value
from passes.search.relax import BUCKET


def evaluate(gm: GraphModule, built: Built, prices: Prices, placed: GraphModule) -> float | None:
    """Predicted step, in seconds, of the layouts of `placed`: the graph `gm` that `built` is of, with reshards of
    parameters added and every node placed. None where it has layouts that the search does not consider."""
    picked = _picked(gm, built, placed)
    if picked is None:
        return None
    problem, kept = built.problem, _kept(placed)
    busy = np.zeros((len(problem.segments), 3))
    for variable, choice in zip(problem.variables, picked, strict=True):
        busy[variable.segment, COMPUTE] += variable.seconds[choice]
    for value in problem.values:
        made = problem.made(value)[picked[value.maker.variable]]
        targets = dict.fromkeys(int(problem.needed(use)[picked[use.variable]]) for use in value.uses)
        for target in targets:
            if target == made or (value.again >= 0 and value.node.name in kept):
                continue
            if not _charge(built, prices, busy, value, int(made), target):
                return None
    return float(busy.max(1).sum())


def _charge(built: Built, prices: Prices, busy: Floats, value: Value, source: int, target: int) -> bool:
    problem = built.problem
    layouts = problem.layout(source), problem.layout(target)
    move = prices.move(value.shape, value.itemsize, *layouts, BUCKET if value.hides else 0)
    if move is None:
        return False
    waits = problem.segments[value.segment].exposed if value.hides else 1.0
    on_path = move.local + waits * (move.inside + move.across)
    busy[value.segment] += np.array([on_path, move.inside, move.across])[[COMPUTE, INSIDE, ACROSS]] * value.count
    return True


def _picked(gm: GraphModule, built: Built, placed: GraphModule) -> list[int] | None:
    """Per variable, the first choice that says what `placed` says of all its nodes."""
    there = {key: node for node, key in _keys(placed).items()}
    allowed = [list(range(len(variable.choices))) for variable in built.problem.variables]
    for node, key in _keys(gm).items():
        if node not in built.owners or key not in there or not has_layout(there[key]):
            continue
        owner, other = built.owners[node], there[key]
        results = layouts_of(other)
        needs = needs_of(other) if node.op == "call_function" and has_needs(other) else ()
        choices = built.problem.variables[owner.variable].choices
        allowed[owner.variable] = [
            number
            for number in allowed[owner.variable]
            if choices[number].results[owner.results : owner.results + len(results_of(node))] == results
            and choices[number].needs[owner.needs : owner.needs + len(needs)] == needs
        ]
    if not all(allowed):
        return None
    return [numbers[0] for numbers in allowed]


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


def _kept(placed: GraphModule) -> set[str]:
    """Names of parameters and their casts whose gathered form is kept for the backward."""
    gathers = [node for node in placed.graph.nodes if is_reshard(node) and not is_recompute(node)]
    return {operands(node)[0].name for node in gathers}
