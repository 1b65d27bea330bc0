"""Take over what a search decided for an earlier call of the same module, so that a call of another shape needs none.

Layouts are kept by the names of values, which two graphs share if they differ in sizes only. Each is checked against
the new sizes and the sharding rules: one that does not divide a dim any more leads to a search of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autoshard.config.axis_recipes import AUTO
from autoshard.planner.evaluation import Folded, phases_of
from autoshard.planner.problem import Problem, Recipes
from autoshard.planner.recomputation import fits_surely
from autoshard.plans.outcome import Recomputation
from autoshard.plans.record import PlanRecord
from passes.base import PassContext, Remark
from passes.errors import CompilerError
from passes.ir.graph import Origin, copy_graph, has_layout, layout_of, pins_of, placeholders
from passes.manager import PassManager
from passes.observers import Verifier
from passes.search.solution import Solution

_SIZE = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")  # not part of a name, unlike the 1 of %mm_1 or layers.1


@dataclass(frozen=True)
class Replay:
    """The decisions of an earlier search."""

    recipes: Recipes
    solution: Solution | None
    recomputation: Recomputation | None
    remark: Remark


def replayed(problem: Problem, folded: Folded, plan: PlanRecord) -> Replay | None:
    """Return the decisions of an earlier search, which made `plan`, if they hold for this problem too; None if not.

    A recipe that was chosen holds for every call. Layouts hold for a graph with the same calls, if its sizes allow them
    and its step surely fits into memory.
    """
    if problem.options.recipe != AUTO or plan.search is None:
        return None
    if plan.solution is None:
        return Replay(plan.recipes, None, None, _remark(folded, f"recipe of the first plan: {plan.search.chosen}"))
    if not (_is_alike(plan, folded) and fits_surely(problem) and is_valid(problem, folded, plan)):
        return None
    remark = _remark(folded, "layouts of the search for an earlier call, whose graph differs in sizes only")
    return Replay(plan.recipes, unpredicted(plan.solution), plan.recomputation, remark)


def unpredicted(solution: Solution) -> Solution:
    """Return the layouts of a solution without what was predicted for other sizes, hardware or options."""
    return replace(solution, objective=0.0, bound=0.0, memory=0.0)


def _is_alike(plan: PlanRecord, folded: Folded) -> bool:
    return shape_free(plan.graphs["CAPTURED"]) == shape_free(folded.text)


def shape_free(text: str) -> str:
    """Return the text of a graph without its sizes and other numbers."""
    return _SIZE.sub("#", text)


def is_valid(problem: Problem, folded: Folded, plan: PlanRecord) -> bool:
    """Return whether the layouts of `plan` fit the sizes, the rules and the constraints of this graph."""
    gm = copy_graph(folded.graph)
    phases = phases_of(problem, gm, plan.recipes, plan.solution, plan.recomputation)
    try:
        PassManager((*phases.place, *phases.make_explicit), (Verifier(),)).run(gm, PassContext(problem.mesh))
    except CompilerError:  # a layout that the sizes do not allow, or a value that the plan does not name
        return False
    inputs = [node for node in placeholders(gm.graph) if has_layout(node)]
    return all(layout_of(node).on(pin.axis) == pin.placement for node in inputs for pin in pins_of(node))


def _remark(folded: Folded, text: str) -> Remark:
    return Remark("search", text, Origin(), next(iter(folded.graph.graph.nodes)).name)
