"""All plans of a small problem, and the cheapest, by the cost function that the search uses."""

from __future__ import annotations

from itertools import product

from passes.search.evaluate import evaluate
from passes.search.model import Plan
from passes.search.prices import Prices
from passes.search.problem import Problem
from passes.search.relax import Sides


def brute_force(problem: Problem, prices: Prices, limit: float | None = None) -> Plan | None:
    """The quickest plan that fits `limit` bytes; None where none does."""
    sides = Sides(problem)
    best: Plan | None = None
    for picked in product(*(range(len(variable.choices)) for variable in problem.variables)):
        for keeps in (0.0, float("inf")):
            plan = evaluate(problem, sides, prices, list(picked), keeps=keeps)
            fits = plan is not None and (limit is None or plan.memory <= limit)
            if plan is not None and fits and (best is None or plan.objective < best.objective):
                best = plan
    return best
