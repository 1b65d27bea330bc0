"""Decide how to distribute a problem: recipes or a solution, what is recomputed, and what a step costs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from autoshard.config.axis_recipes import AUTO, recipes_of, rule_of_thumb
from autoshard.config.progress import Progress, silent, told_if_slow
from autoshard.config.topology import hardware_of
from autoshard.planner.candidates import AGAIN
from autoshard.planner.earlier_plans import is_valid, replayed, unpredicted
from autoshard.planner.effort import FULL, QUICK, Effort
from autoshard.planner.evaluation import Evaluation, Folded, folded_as
from autoshard.planner.memory_limit import check_memory, plan_evaluation
from autoshard.planner.paddings.variants import best_of_variants
from autoshard.planner.prediction import memory_of, timed
from autoshard.planner.problem import Problem, Recipes, dims_padded_as, dims_padded_for, given_recipes, padded_as
from autoshard.planner.recipe_variants import fastest_variant, format_recipes
from autoshard.planner.recomputation import fits_surely
from autoshard.planner.standings import SOLVED
from autoshard.plans.collectives import Collective
from autoshard.plans.outcome import Candidate, Cost, Recomputation, Search
from autoshard.plans.record import PlanRecord
from passes.base import Remark
from passes.cost.simulate import Timeline
from passes.errors import MemoryLimitError
from passes.ir.graph import Origin, has_backward
from passes.ir.units import format_seconds
from passes.search.prepared import Prepared
from passes.search.solution import Solution

BEFORE = f"{SOLVED} before"  # name of a candidate: the solver's plan that is planned again
FIXING = ("outputs", "loss", "reshard_after_forward")  # options that fix what no layout of an input shows

_log = logging.getLogger("autoshard.planner")


@dataclass(frozen=True)
class Decision:
    """The decisions of a plan; `evaluation` and all costs are None where no step was simulated."""

    recipes: Recipes
    solution: Solution | None = None
    search: Search | None = None
    cost: Cost | None = None
    timeline: Timeline | None = None
    evaluation: Evaluation | None = None
    recomputation: Recomputation | None = None
    collectives: tuple[Collective, ...] = ()  # with predicted times
    remarks: tuple[Remark, ...] = ()
    prepared: Prepared | None = None
    pads: bool = True
    padded_axes: tuple[int, ...] | None = None  # None: those of the problem
    compute_axes: tuple[int, ...] | None = None  # the same
    folded: Folded | None = None  # that candidates were evaluated on, if another one than was given

    @property
    def step_time(self) -> float:
        """Return the seconds of the simulated step; infinity where none was simulated."""
        return float("inf") if self.cost is None else self.cost.step_time

    def variant(self, problem: Problem, folded: Folded) -> tuple[Problem, Folded]:
        """Return the problem and the folded graph that were decided on: with padded dims and split products, or without."""
        padded = problem.padded_axes if self.padded_axes is None else self.padded_axes
        compute = problem.compute_axes if self.compute_axes is None else self.compute_axes
        made = replace(problem, pads=self.pads, padded_axes=padded, compute_axes=compute)
        return made if self.solution is not None else dims_padded_for(made, self.recipes), self.folded or folded


def decide(problem: Problem, folded: Folded, effort: Effort, progress: Progress) -> Decision:
    """Decide by the recipe that is asked for, by a plan for an earlier call, or by a search."""
    options, recipes = problem.options, recipes_of(problem.options.recipe, problem.mesh)
    if options.recipe != AUTO or options.passes is not None or problem.mesh.size == 1:
        return Decision(recipes, recomputation=_recomputation(problem, folded))
    if problem.mesh.hardware is None:
        return Decision(recipes, recomputation=_recomputation(problem, folded), remarks=(_not_searched(problem),))
    if (taken := _taken_over(problem, folded)) is not None:
        return taken
    with told_if_slow(options.time_limit):
        choice, problem, folded = best_of_variants(problem, folded, effort, progress)
    for one in choice.search.candidates:
        time = "not simulated" if one.cost is None else format_seconds(one.cost.step_time)
        _log.info("candidate %s: %s%s", one.name, time, f" ({one.note})" if one.note else "")
    _log.info("chose %s in %s", choice.search.chosen, format_seconds(choice.search.seconds))
    return replace(_found(problem, folded, choice.evaluation, choice.search, choice.solution), prepared=choice.prepared)


def _found(problem: Problem, folded: Folded, one: Evaluation, search: Search, solution: Solution | None) -> Decision:
    """Return the decision for a candidate of a search; `solution` is None for a recipe's."""
    return Decision(
        one.recipes,
        solution,
        search,
        one.cost,
        one.timeline,
        one,
        one.recomputation,
        timed(one.facts["collectives"], one.timeline),
        pads=problem.pads,
        padded_axes=problem.padded_axes,
        compute_axes=problem.compute_axes,
        folded=folded,
    )


@dataclass(frozen=True)
class Present:
    """A plan that is planned again, and the problem that it was made for."""

    plan: PlanRecord
    problem: Problem


def decide_beside(
    problem: Problem, folded: Folded, present: Present | None, effort: Effort, progress: Progress
) -> Decision:
    """Decide as `decide` does; where the layouts of the `present` plan hold for this problem, too, and a search finds no plan
    that is as fast, or none that fits, they are kept.
    """
    if present is None or problem.mesh.size == 1 or given_recipes(problem.options, problem.mesh) is not None:
        return decide(problem, folded, effort, progress)
    kept = _kept(problem, folded, present)
    try:
        decision = decide(problem, folded, effort, progress)
    except MemoryLimitError:
        if kept is None:
            raise
        return kept
    if kept is None or decision.search is None or kept.step_time >= decision.step_time:
        return decision
    assert kept.search is not None
    others = tuple(one for one in decision.search.candidates if one.name != kept.search.chosen)
    searched = replace(decision.search, chosen=kept.search.chosen, candidates=(*kept.search.candidates, *others))
    return replace(kept, search=searched)


def _kept(problem: Problem, folded: Folded, present: Present) -> Decision | None:
    """Return the layouts of the present plan as a decision, if they hold for this problem and fit; None if not.

    They are simulated within the memory that the plan was made for: more memory makes no step slower. A plan that takes more than
    this problem allows is not made to fit.
    """
    plan, before = present.plan, present.problem
    is_alike = (problem.mesh.names, problem.mesh.sizes) == (before.mesh.names, before.mesh.sizes)
    fixed = [[getattr(one.options, name) for name in FIXING] for one in (problem, before)]
    if not is_alike or fixed[0] != fixed[1] or (plan.solution is None and not any(plan.recipes)):
        return None
    limit = problem.options.memory_bytes(memory_of(problem.mesh))
    if plan.cost is None or plan.cost.peak_memory > limit:
        return None
    problem = padded_as(problem, plan)
    folded = folded_as(problem, folded)
    if not is_valid(problem, folded, plan):
        return None
    solution = None if plan.solution is None else unpredicted(plan.solution)
    limited = replace(problem, options=replace(problem.options, memory_limit=before.options.memory_limit))
    one = plan_evaluation(limited, folded, plan.recipes, plan.solution)
    if one.cost.peak_memory > limit:
        return None
    name = format_recipes(plan.recipes) if plan.solution is None else BEFORE
    note = AGAIN if one.recomputation is not None else ""
    search = Search(name, (Candidate(name, one.cost, fits=True, note=note),), limit, None, None)
    return _found(problem, folded, one, search, solution)


def _taken_over(problem: Problem, folded: Folded) -> Decision | None:
    """Return what a search decided for an earlier call, if that holds for this one, too."""
    for plan in problem.earlier:
        variant = dims_padded_as(problem, plan)
        graph = folded_as(variant, folded)
        if (replay := replayed(variant, graph, plan)) is not None:
            return Decision(
                replay.recipes,
                replay.solution,
                recomputation=replay.recomputation,
                remarks=(replay.remark,),
                pads=variant.pads,
                compute_axes=variant.compute_axes,
                folded=graph,
            )
    return None


def decide_for_run(problem: Problem, folded: Folded, progress: Progress) -> Decision:
    """Decide as `decide` does, and simulate the step if the user named the hardware or memory may be short."""
    decision = decide(problem, folded, QUICK if problem.earlier else FULL, progress)
    problem, folded = decision.variant(problem, folded)
    if _is_predicted(problem):
        return predicted(problem, folded, decision)
    if decision.evaluation is None and _may_need_memory(problem):
        evaluation = plan_evaluation(problem, folded, decision.recipes, decision.solution)
        check_memory(problem, folded, evaluation)
        return replace(decision, recomputation=evaluation.recomputation)
    return decision


def is_given(problem: Problem) -> bool:
    """Return whether the options say all about a program that is run: nothing is searched for, and no step simulated."""
    return problem.options.recipe != AUTO and _is_as_decided(problem)


def decided_alike(problem: Problem, folded: Folded) -> Decision | None:
    """Return the decisions that every rank comes to by itself, from the options or from an earlier plan; None where the
    first rank searches for them, or simulates a step.
    """
    if not _is_as_decided(problem):
        return None
    return decide(problem, folded, QUICK, silent) if is_given(problem) else _taken_over(problem, folded)


def _is_as_decided(problem: Problem) -> bool:
    """Return whether a program is run as it is decided: no step of it is simulated, and no pass of the user's runs."""
    return problem.options.passes is None and not _is_predicted(problem) and not _may_need_memory(problem)


def _is_predicted(problem: Problem) -> bool:
    """Return whether the step of a program that is run is predicted: not from the figures that are assumed for a CPU."""
    known = problem.mesh.hardware
    return known is not None and (problem.options.hardware != "auto" or known != hardware_of("cpu"))


def decision_of(plan: PlanRecord, folded: Folded) -> Decision:
    """Return the decisions of a plan that is followed."""
    return Decision(
        plan.recipes,
        plan.solution,
        plan.search,
        plan.cost,
        plan.timeline,
        recomputation=plan.recomputation,
        collectives=plan.collectives,
        pads=plan.pads,
        folded=folded,
    )


def _may_need_memory(problem: Problem) -> bool:
    """Return whether only a simulated step can tell what has to be recomputed, or whether it fits at all."""
    options = problem.options
    is_asked = options.memory_limit is not None or (options.recompute == "auto" and problem.training)
    return is_asked and options.passes is None and problem.mesh.hardware is not None and not fits_surely(problem)


def _recomputation(problem: Problem, folded: Folded) -> Recomputation | None:
    """Return what is recomputed if no step is simulated."""
    return Recomputation(()) if problem.options.recompute == "block" and has_backward(folded.graph.graph) else None


def predicted(problem: Problem, folded: Folded, decision: Decision) -> Decision:
    """Add the predicted cost of a step, if the search has not found it and the hardware is known."""
    if decision.evaluation is not None or problem.mesh.hardware is None or problem.options.passes is not None:
        return decision
    evaluation, remarks = fastest_variant(problem, folded, decision.recipes, decision.solution)
    check_memory(problem, folded, evaluation)
    collectives = timed(evaluation.facts["collectives"], evaluation.timeline)
    return replace(
        decision,
        recipes=evaluation.recipes,
        evaluation=evaluation,
        cost=evaluation.cost,
        timeline=evaluation.timeline,
        recomputation=evaluation.recomputation,
        collectives=collectives,
        remarks=(*decision.remarks, *remarks),
    )


def _not_searched(problem: Problem) -> Remark:
    chosen = ", ".join(f"{axis}: {one}" for axis, one in zip(problem.mesh.names, rule_of_thumb(problem.mesh), strict=True))
    text = (
        f"the figures of this device are not known, so that nothing was searched for: {chosen}; give "
        "Options(hardware='h100') or another preset, or measure it with `python -m autoshard calibrate`"
    )
    first = next(iter(problem.captured.call.tensors))
    return Remark("search", text, Origin(), first.name.replace(".", "_"))
