"""The search: reduce the problem to what a bound on the step allows, solve it, and widen the bound if need be."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from passes.errors import CompilerError
from passes.ir.graph import OutputRole, item_of, operands, outputs_of, results_of, returned
from passes.ir.mesh import Mesh
from passes.search.bound import Dual
from passes.search.build import Built, build
from passes.search.evaluate import evaluate
from passes.search.experts import price
from passes.search.kernels import Kernels
from passes.search.model import Model, Plan
from passes.search.prices import Prices
from passes.search.problem import Problem
from passes.search.relax import Sides, Weights, refine, relaxed
from passes.search.solution import Placed, Solution, keys_of

WIDENINGS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)  # over the bound: how long a plan may take
SWEEPS = 30  # of dual ascent; it stops before where the bound stays
REFINED = (0.002, 0.01)  # over the bound: moves that a plan of that length may make get their own price
STRIKES = 3  # sweeps that strike choices


@dataclass(frozen=True)
class Goal:
    """What is asked of a search. Bytes per device; seconds."""

    memory_limit: float | None = None
    gap: float = 0.005
    time_limit: float | None = None


@dataclass(frozen=True, eq=False)
class Searched:
    """What a search found, and what it knows of the graph."""

    solution: Solution
    graph: GraphModule
    built: Built
    prices: Prices

    def price(self, placed: GraphModule) -> float | None:
        """Predicted step, in seconds, of the layouts of `placed`; None where the search does not consider them."""
        return price(self.graph, self.built, self.prices, placed)


def find(gm: GraphModule, mesh: Mesh, goal: Goal) -> Searched:
    """The layouts of a CAPTURED graph with the least predicted step that fits the memory.

    Raises ConstraintError for pins that no layout meets.
    """
    started = time.perf_counter()
    assert mesh.hardware is not None
    prices = Prices(mesh, mesh.hardware)
    built = build(gm, Kernels(gm.graph, prices))
    plan, bound = solve(built.problem, prices, goal)
    solution = _solution(gm, built, plan, bound, time.perf_counter() - started)
    return Searched(solution, gm, built, prices)


def solve(problem: Problem, prices: Prices, goal: Goal) -> tuple[Plan, float]:
    """The best plan, and what no plan is better than, in seconds."""
    started = time.perf_counter()
    sides = Sides(problem)
    dual = relaxed(problem, sides, prices, Weights.computation(problem))
    dual.ascend(SWEEPS)
    best = _decoded(problem, sides, prices, dual, goal)
    for refined in REFINED:
        refine(dual, problem, sides, prices, dual.bound * (1 + refined))
        dual.ascend(SWEEPS)
        plan = _decoded(problem, sides, prices, dual, goal)
        if plan is not None and (best is None or plan.objective < best.objective):
            best = plan
        if best is not None and best.objective - dual.bound <= goal.gap * best.objective:
            return best, min(dual.bound, best.objective)
    bound = dual.bound
    for widening in WIDENINGS:
        worst = dual.bound * (1 + widening)
        if best is not None:
            worst = min(worst, best.objective)
        struck = dual.copied()
        struck.strike(worst, STRIKES)
        if all(len(alive) for alive in struck.alive()):
            left = None if goal.time_limit is None else goal.time_limit - (time.perf_counter() - started)
            plan = None
            if left is None or left > 0:
                plan = Model(problem, sides, prices, struck, goal.memory_limit).solve(goal.gap / 2, left)
            if plan is not None and (best is None or plan.objective < best.objective):
                best = plan
            if plan is None and left is not None and best is not None:
                return best, bound
            bound = max(bound, min(worst, plan.bound if plan is not None else worst))
        else:
            bound = max(bound, worst)
        if best is not None and best.objective - bound <= goal.gap * best.objective:
            return best, min(bound, best.objective)
    raise CompilerError("no layouts fit together")


def _decoded(problem: Problem, sides: Sides, prices: Prices, dual: Dual, goal: Goal) -> Plan | None:
    """A plan that the dual points to; None where it does not fit."""
    picked = dual.decode(range(len(dual.choices)))
    for keeps in (True, False):
        plan = evaluate(problem, sides, prices, picked, keeps=keeps)
        if plan is not None and (goal.memory_limit is None or plan.memory <= goal.memory_limit):
            return plan
    return None


def _solution(
    gm: GraphModule, built: Built, plan: Plan, bound: float, seconds: float
) -> Solution:
    keys, problem, picked = keys_of(gm), built.problem, plan.picked
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
    kept = [keys[problem.values[number].node] for number in plan.kept]
    return Solution(
        nodes, outputs, tuple(kept), plan.objective, bound, plan.memory, seconds, len(problem.variables)
    )
