"""What an expert's plan costs by the model of the search: layouts that were found without it."""

from __future__ import annotations

from collections.abc import Iterator

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
from passes.search.evaluate import evaluate
from passes.search.prices import Prices
from passes.search.relax import Sides


def price(gm: GraphModule, built: Built, prices: Prices, placed: GraphModule) -> float | None:
    """Predicted step, in seconds, of the layouts of `placed`: the graph `gm` that `built` is of, with reshards added
    and every node placed. None where it has layouts that the search does not consider."""
    picked = _picked(gm, built, placed)
    if picked is None:
        return None
    problem, gathers_again = built.problem, any(is_recompute(node) for node in placed.graph.nodes if is_reshard(node))
    keeps = float("inf") if gathers_again else 0.0
    plan = evaluate(problem, Sides(problem), prices, picked, keeps=keeps, repeats=0.0)
    return None if plan is None else plan.objective


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
