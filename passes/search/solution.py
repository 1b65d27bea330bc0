"""The result of a search: layouts by name, so that they apply to a folded graph and to the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch.fx import GraphModule, Node

from passes.ir.folded_layers import Repeats, expand_names
from passes.ir.graph import (
    OutputRole,
    input_of,
    item_of,
    note_of,
    operands,
    outputs_of,
    placeholders,
    results_of,
    returned,
)
from passes.ir.layout import Layout
from passes.search.model.factor_graph import FactorGraph
from passes.search.model.skeleton import Skeleton
from passes.search.model.strategies import Strategy
from passes.search.solvers.evaluate import Assignment

T = TypeVar("T")


@dataclass(frozen=True)
class Placed:
    """The layouts of a node: needed of each operand, and of each result."""

    needs: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class Solution:
    """The layouts of a plan, with its cost by the search's objective.

    `nodes` are by key (`keys_of`), `outputs` by the output's path; `kept` are keys of parameters that the forward
    gathers and keeps for the backward; `repeated` are keys of other values whose transition is repeated in the backward
    instead of keeping its result. Seconds; bytes.
    """

    nodes: Mapping[str, Placed]
    outputs: Mapping[str, Layout]
    kept: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    objective: float = 0.0  # predicted step
    bound: float = 0.0  # no plan is better than this
    memory: float = 0.0  # predicted, per device
    seconds: float = field(default=0.0, compare=False)  # the search took
    variables: int = 0

    @property
    def gap(self) -> float:
        """Return the fraction of the objective by which a plan could be better at most."""
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective else 0.0

    def expanded(self, repeats: Repeats) -> Solution:
        """Return the solution for the whole graph that was folded."""
        kept, repeated = (tuple(_expanded(repeats, dict.fromkeys(keys))) for keys in (self.kept, self.repeated))
        return replace(self, nodes=_expanded(repeats, self.nodes), kept=kept, repeated=repeated)


def solution_of(
    gm: GraphModule, skeleton: Skeleton, graph: FactorGraph, assignment: Assignment, *, bound: float, seconds: float
) -> Solution:
    """Read the layouts of all nodes and outputs off an assignment."""
    keys, picked = keys_of(gm), assignment.strategies
    nodes: dict[str, Placed] = {}
    for node in gm.graph.nodes:
        if node.op == "output" or not results_of(node) or item_of(node) is not None:
            continue
        owner = skeleton.owners[skeleton.leader[node]]
        strategy = graph.variables[owner.variable].strategies[picked[owner.variable]]
        count = 0 if node.op == "placeholder" else len(operands(node))
        nodes[keys[node]] = Placed(
            strategy.needs[owner.needs : owner.needs + count],
            strategy.results[owner.results : owner.results + len(results_of(node))],
        )
    outputs = {}
    for position, (value, output) in enumerate(zip(returned(gm.graph), outputs_of(gm.graph), strict=True)):
        if output.role is OutputRole.OUTPUT and isinstance(value, Node):
            end = skeleton.ends.get(position)
            if end is not None:
                outputs[output.name] = graph.variables[end.variable].strategies[picked[end.variable]].needs[end.slot]
            else:
                outputs[output.name] = nodes[keys[value]].results[0]
    kept, repeated = (
        {skeleton.leader[graph.values[number].node] for number in numbers}
        for numbers in (assignment.kept, assignment.repeated)
    )
    kept_keys, repeated_keys = (
        tuple(keys[node] for node in gm.graph.nodes if skeleton.leader.get(node) in leaders) for leaders in (kept, repeated)
    )
    figures = assignment.objective, bound, assignment.memory, seconds, len(graph.variables)
    return Solution(nodes, outputs, kept_keys, repeated_keys, *figures)


def strategies_of(gm: GraphModule, skeleton: Skeleton, graph: FactorGraph, solution: Solution) -> list[int]:
    """Return the strategy of each variable that gives the layouts of a solution: the inverse of `solution_of`."""
    keys = keys_of(gm)
    placed: list[dict[tuple[str, int], Layout]] = [{} for _ in graph.variables]  # by side and slot
    for node, owner in skeleton.owners.items():
        if (one := solution.nodes.get(keys[node])) is not None:
            placed[owner.variable] |= {("needs", owner.needs + i): layout for i, layout in enumerate(one.needs)}
            placed[owner.variable] |= {("results", owner.results + i): layout for i, layout in enumerate(one.results)}
    for position, end in skeleton.ends.items():
        output = outputs_of(gm.graph)[position]
        if output.name in solution.outputs and output.role is OutputRole.OUTPUT:
            placed[end.variable]["needs", end.slot] = solution.outputs[output.name]
    return [
        next(i for i, one in enumerate(variable.strategies) if _gives(one, layouts))
        for variable, layouts in zip(graph.variables, placed, strict=True)
    ]


def _gives(strategy: Strategy, layouts: Mapping[tuple[str, int], Layout]) -> bool:
    return all(getattr(strategy, side)[slot] == layout for (side, slot), layout in layouts.items())


def _expanded(repeats: Repeats, kept: Mapping[str, T]) -> dict[str, T]:
    """Expand names, and keys that are a parameter's name and a number."""
    found = expand_names(repeats, kept)
    numbered = [(key, *key.rpartition("#")[::2]) for key in kept if "#" in key]
    for removed, name in repeats.parameters.items():
        found |= {f"{removed}#{number}": kept[key] for key, owner, number in numbered if owner == name}
    return found


def keys_of(gm: GraphModule) -> dict[Node, str]:
    """Return node names that are the same in the folded graph and in the whole one.

    A node of the program has its own name; one that a pass added is named by the parameter or output next to it.
    """
    keys = {node: node.name for node in gm.graph.nodes}
    for node in placeholders(gm.graph):
        _walk(node, input_of(node).name, keys, down=True)
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        if isinstance(value, Node):
            _walk(value, output.name, keys, down=False)
    return keys


def _walk(node: Node, name: str, keys: dict[Node, str], *, down: bool) -> None:
    """Name the chain of added nodes after a placeholder, or before what is returned."""
    number = 0
    if down:
        for user in node.users:
            if user.op == "call_function" and note_of(user) and len(operands(user)) == 1:
                keys[user] = f"{name}#{number}"
                number += 1
        return
    while node.op == "call_function" and note_of(node) and len(operands(node)) == 1:
        keys[node] = f"{name}#-{number}"
        node, number = operands(node)[0], number + 1
