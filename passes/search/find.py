"""The search: reduce the problem to what a bound on the step allows, solve it, and widen the bound if need be."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from passes.errors import CompilerError
from passes.ir.graph import OutputRole, is_tensor, item_of, operands, outputs_of, results_of, returned
from passes.ir.mesh import Mesh
from passes.search.build import Built, build
from passes.search.kernels import Kernels
from passes.search.model import Model
from passes.search.prices import Prices
from passes.search.solution import Placed, Solution, keys_of

WIDENINGS = (0.15, 0.5, 2.0, 10.0, 1e9)  # over the least seconds of computation: how long a plan may take


@dataclass(frozen=True)
class Goal:
    """What is asked of a search. Bytes per device; seconds."""

    memory_limit: float | None = None
    gap: float = 0.005
    time_limit: float | None = None


def find(gm: GraphModule, mesh: Mesh, goal: Goal = Goal()) -> Solution:
    """The layouts of a CAPTURED graph with the least predicted step that fits the memory.

    Raises ConstraintError for pins that no layout meets.
    """
    started = time.perf_counter()
    assert mesh.hardware is not None
    prices = Prices(mesh, mesh.hardware)
    built = build(gm, Kernels(gm.graph, prices))
    picked, objective, bound = solve(built, prices, goal)
    return _solution(gm, built, picked, objective, bound, time.perf_counter() - started)


def solve(built: Built, prices: Prices, goal: Goal) -> tuple[list[int], float, float]:
    """The number of the choice of each variable, the objective and the bound, in seconds."""
    problem = built.problem
    least = sum(float(variable.seconds.min()) for variable in problem.variables)
    for widening in WIDENINGS:
        model = Model(problem, prices, max(widening * least, 1e-12))
        model.reduce()
        answer = model.solve(goal.gap, goal.time_limit)
        if answer is not None and answer.objective <= least + model.slack:
            return answer.picked, answer.objective, min(answer.bound, least + model.slack)
    raise CompilerError("no layouts fit together")


def _solution(
    gm: GraphModule, built: Built, picked: list[int], objective: float, bound: float, seconds: float
) -> Solution:
    keys, problem = keys_of(gm), built.problem
    nodes: dict[str, Placed] = {}
    for node in gm.graph.nodes:
        if node.op == "output" or not results_of(node) or item_of(node) is not None:
            continue
        owner = built.owners[built.first[node]]
        choice = problem.variables[owner.variable].choices[picked[owner.variable]]
        count = 0 if node.op == "placeholder" else len(operands(node))
        nodes[keys[node]] = Placed(
            choice.needs[owner.needs : owner.needs + count],
            choice.results[owner.results : owner.results + len(results_of(node))],
        )
    outputs = {}
    for position, (value, output) in enumerate(zip(returned(gm.graph), outputs_of(gm.graph), strict=True)):
        if output.role is OutputRole.OUTPUT and isinstance(value, Node):
            use = built.ends.get(position)
            if use is not None:
                outputs[output.name] = problem.variables[use.variable].choices[picked[use.variable]].needs[use.slot]
            else:
                outputs[output.name] = nodes[keys[value]].results[0]
    return Solution(nodes, outputs, (), objective, bound, 0.0, seconds, len(problem.variables))
