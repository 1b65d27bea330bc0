"""Make a plan from a module and its arguments, and the per-device program of the plan; no process group is needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch.fx import GraphModule

from autoshard.capture.capture import Captured
from autoshard.capture.garbage import uncollected
from autoshard.capture.shallow import few_layers, is_alike, whole_graph
from autoshard.config.progress import Progress, silent
from autoshard.config.settings import settings_of
from autoshard.dumps.graph_dump import GraphDump, dump_of
from autoshard.planner.decision import (
    Decision,
    Present,
    decide,
    decide_beside,
    decide_for_run,
    decided_alike,
    decision_of,
    is_given,
    predicted,
)
from autoshard.planner.effort import FULL, Effort
from autoshard.planner.evaluation import (
    Evaluation,
    Folded,
    Recorder,
    equal_layers,
    fold,
    folded_as,
    phases_of,
    prepared,
)
from autoshard.planner.later_program import Lowered, lowered_by_layers, numbered_draws
from autoshard.planner.prediction import timed_as
from autoshard.planner.problem import Problem, captured_problem, padded_as
from autoshard.planner.request import EarlierProgram, PlanRequest
from autoshard.planner.state import PlanningState
from autoshard.plans.compatibility import check_model
from autoshard.plans.record import PlanRecord
from passes.base import Observer, PassContext, Remark
from passes.errors import PlanError
from passes.ir.folded_layers import expand_names
from passes.ir.graph import copy_graph
from passes.manager import PassManager
from passes.observers import Logger, Timer, Verifier

_log = logging.getLogger("autoshard.planner")


@dataclass(frozen=True)
class Planned:
    """A plan, the signature of the captured model, and the per-device program. `seconds` is time by phase."""

    plan: PlanRecord
    captured: Captured
    graph: GraphModule
    seconds: Mapping[str, float]


def plan_ahead(
    request: PlanRequest, *, effort: Effort = FULL, progress: Progress = silent
) -> tuple[PlanRecord, PlanningState]:
    """Plan a call and, on known hardware, predict its step; return the plan and the planner's state.

    No program is made. Only a few of many equal layers are planned, so that planning time hardly grows with depth.
    `progress` is called with the name of each phase as it begins. Raises UserErrors for a model, mesh or options that
    cannot work.
    """
    request = request.checked()
    progress("capture")
    return plan_problem(captured_problem(request), effort=effort, progress=progress)


def plan_problem(
    problem: Problem,
    *,
    effort: Effort = FULL,
    progress: Progress = silent,
    folded: Folded | None = None,
    present: Present | None = None,
) -> tuple[PlanRecord, PlanningState]:
    """Plan a captured model as `plan_ahead` does, without changing its graph. `folded` is the result of `fold`, if
    known; the `present` plan is kept where the search finds none as fast.
    """
    if folded is None:
        progress("fold")
        folded = fold(problem, progress=progress)
    decision = decide_beside(problem, folded, present, effort, progress)
    problem, folded = decision.variant(problem, folded)
    if problem.options.passes is not None or problem.mesh.hardware is None:
        made = _programmed(problem, folded, decision, Timer()).plan
    else:
        progress("passes")
        decision = predicted(problem, folded, decision)
        assert decision.evaluation is not None
        made = _assembled(problem, folded.text, decision.evaluation, decision)
        if (dump := dump_of(problem.options)) is not None:
            _dump(problem, folded, decision, dump)
    return made, PlanningState(problem, folded, effort, decision.prepared)


def make_plan(
    request: PlanRequest,
    *,
    plan: PlanRecord | Callable[[], PlanRecord] | None = None,
    progress: Progress = silent,
    observers: tuple[Observer, ...] = (),
) -> Planned:
    """Capture a call, decide how to distribute it, and make the per-device program.

    `plan` is a plan to follow, or a function that waits for one. `progress` is called with the name of each phase as
    it begins; `observers` see the graph before and after every pass. The step is predicted on known hardware, except
    for a recipe on a CPU that the user did not name: the figures assumed for it may be far off. Raises UserErrors for
    a model, mesh or options that cannot work.
    """
    request = request.checked()
    timer = Timer()
    started = time.perf_counter()
    progress("capture")
    problem = captured_problem(request)
    earlier = tuple(one for one in request.programs if is_alike(problem.captured, one.captured.graph_module))
    few = None
    if earlier:
        few = few_layers(problem.captured, equal_layers(problem), problem.mesh, [one.local for one in earlier])
    timer.seconds["capture"] = time.perf_counter() - started

    @cache
    def decided() -> PlanRecord:
        assert plan is not None
        return plan if isinstance(plan, PlanRecord) else plan()

    def followed(folded: Callable[[PlanRecord], Folded]) -> PlanRecord:
        settings = settings_of(request.options, training=request.training, device=request.device)
        check_model(decided(), request.module, folded(decided()).text, settings)
        return decided()

    follow = None if plan is None else followed
    if few is not None:
        made = None if observers else _of_few_layers(problem, few, earlier, follow, progress, timer)
        if made is not None:
            return made
        known = whole_graph(few, [one.captured.graph_module for one in earlier])
        problem = replace(problem, captured=replace(problem.captured, known=known))
    problem.captured.trace()
    timer.seconds["capture"] = time.perf_counter() - started
    return program_problem(
        problem,
        follow=follow,
        progress=progress,
        observers=observers,
        timer=timer,
        earlier=earlier,
        waits=not isinstance(plan, PlanRecord),
    )


Follow = Callable[[Callable[[PlanRecord], Folded]], PlanRecord]  # given a function that folds the graph as a plan has it


def _of_few_layers(
    problem: Problem,
    few: GraphModule,
    earlier: Sequence[EarlierProgram],
    follow: Follow | None,
    progress: Progress,
    timer: Timer,
) -> Planned | None:
    """Make a program that the options say all about from `few` layers; None if it is not surely that of all.

    Every rank decides alike, so that none waits for the plan of the first before its program is made.
    """
    problem = replace(problem, captured=replace(problem.captured, known=few))
    if not is_given(problem) or dump_of(problem.options) is not None:
        return None
    progress("passes")
    folded = numbered_draws(prepared(problem), few, earlier)
    if folded is None:
        return None
    decision = decide(problem, folded, FULL, progress)
    lowered = lowered_by_layers(problem, folded, decision, earlier, (timer, Logger()))
    if lowered is None:
        return None
    made = _planned(problem, folded, decision, lowered, timer)
    if follow is not None:
        try:
            plan = follow(lambda plan: folded)
        except PlanError:  # it was made from all layers, or is for another model
            return None
        return _decided_as(made, plan)
    return made


def _decided_as(made: Planned, plan: PlanRecord) -> Planned | None:
    """Return a program with what the first rank's `plan` says of its step; None if that is decided otherwise."""
    decided = "recipes", "solution", "recomputation", "pads", "padded_axes", "compute_axes"
    own, names = made.plan, (*decided, "parameters", "inputs", "outputs")
    if any(getattr(own, name) != getattr(plan, name) for name in names):
        return None
    sent = timed_as(own.collectives, plan.collectives)
    told = replace(own, search=plan.search, cost=plan.cost, timeline=plan.timeline, collectives=sent)
    return replace(made, plan=told)


def program_problem(
    problem: Problem,
    *,
    follow: Follow | None = None,
    progress: Progress = silent,
    observers: tuple[Observer, ...] = (),
    timer: Timer | None = None,
    earlier: Sequence[EarlierProgram] = (),
    waits: bool = False,
) -> Planned:
    """Make the program of a captured model as `make_plan` does, without changing its graph; `follow` returns the plan
    to follow, given a function that returns the folded graph that a plan is for, and `waits` for it.
    """
    timer, started = timer or Timer(), time.perf_counter()
    progress("fold")
    folded = fold(problem, whole=True)

    def folded_for(plan: PlanRecord) -> Folded:
        return folded_as(padded_as(problem, plan), folded)

    def made(problem: Problem, folded: Folded, decision: Decision) -> Planned:
        timer.seconds["decide"] = time.perf_counter() - started
        progress("passes")
        problem, folded = decision.variant(problem, folded)
        lowered, is_watched = None, bool(observers) or dump_of(problem.options) is not None
        if earlier and folded.repeats.runs and not is_watched and problem.options.passes is None:
            lowered = lowered_by_layers(problem, folded, decision, earlier, (timer, Logger()))
        lowered = lowered or _lowered(problem, folded, decision, timer, observers)
        return _planned(problem, folded, decision, lowered, timer)

    if follow is None:
        return made(problem, folded, decide_for_run(problem, folded, progress))
    if waits and (decision := decided_alike(problem, folded)) is not None:
        same = _decided_as(made(problem, folded, decision), follow(folded_for))
        if same is not None:
            return same
    plan = follow(folded_for)
    return made(padded_as(problem, plan), folded_for(plan), decision_of(plan, folded_for(plan)))


def _programmed(problem: Problem, folded: Folded, decision: Decision, timer: Timer) -> Planned:
    """Make the per-device program of the whole model, and its plan."""
    return _planned(problem, folded, decision, _lowered(problem, folded, decision, timer), timer)


@uncollected()
def _lowered(
    problem: Problem, folded: Folded, decision: Decision, timer: Timer, watching: tuple[Observer, ...] = ()
) -> Lowered:
    """Run the passes on the whole model."""
    options, gm = problem.options, copy_graph(problem.captured.graph_module)
    ctx = PassContext(problem.mesh, unknown_ops=options.unknown_ops)
    solution = None if decision.solution is None else decision.solution.expanded(folded.repeats)
    phases = phases_of(problem, gm, decision.recipes, solution, decision.recomputation)
    passes = phases.fill(options.passes) if options.passes else phases.passes
    recorder, dump = Recorder(passes), dump_of(options)
    observers: tuple[Observer, ...] = (timer, Verifier(), recorder, Logger(), *watching)
    if dump is not None:
        observers = (*observers, dump.of(passes, options))
    PassManager(passes, observers).run(gm, ctx)
    return Lowered(gm, recorder.facts, recorder.graphs, tuple(ctx.remarks), tuple(ctx.edges))


def _planned(problem: Problem, folded: Folded, decision: Decision, lowered: Lowered, timer: Timer) -> Planned:
    """Return a program with its plan."""
    facts = dict(lowered.facts)
    facts["collectives"] = timed_as(facts["collectives"], decision.collectives)
    plan = PlanRecord(
        mesh=problem.mesh,
        recipes=decision.recipes,
        remarks=_remarks((*problem.remarks, *decision.remarks, *lowered.remarks)),
        graphs={"CAPTURED": folded.text, **lowered.graphs},
        settings=settings_of(problem.options, training=problem.training, device=problem.device),
        cost=decision.cost,
        search=decision.search,
        solution=decision.solution,
        timeline=decision.timeline,
        repeats=lowered.repeats,
        edges=lowered.edges,
        recomputation=decision.recomputation,
        **_paddings(problem),
        **facts,
    )
    return Planned(plan, problem.captured, lowered.graph, timer.seconds)


def _paddings(problem: Problem) -> dict[str, Any]:
    """Return what a plan says of how its problem is padded, and of how the caller splits the batch."""

    def named(axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(problem.mesh.names[axis] for axis in axes)

    return {
        "pads": problem.pads,
        "padded_axes": named(problem.padded_axes),
        "compute_axes": named(problem.compute_axes),
        "batch_axes": None if problem.batch_axes is None else named(problem.batch_axes),
    }


def _dump(problem: Problem, folded: Folded, decision: Decision, dump: GraphDump) -> None:
    """Run the passes of the chosen plan once more on the folded graph, to dump it after each pass."""
    assert decision.evaluation is not None
    evaluation, solution = decision.evaluation.folded, decision.solution
    if solution is not None and evaluation.repeats != folded.repeats:
        solution = solution.expanded(folded.repeats)
    gm = copy_graph(evaluation.graph)
    passes = phases_of(problem, gm, decision.recipes, solution, decision.recomputation).passes
    ctx = PassContext(problem.mesh, unknown_ops=problem.options.unknown_ops)
    PassManager(passes, (dump.of(passes, problem.options),)).run(gm, ctx)


def _assembled(problem: Problem, captured: str, evaluation: Evaluation, decision: Decision) -> PlanRecord:
    """Return the plan of the whole model, given the evaluation of the folded graph."""
    folded = evaluation.folded
    parameters = expand_names(folded.repeats, evaluation.facts["parameters"])
    order = problem.captured.parameters
    return PlanRecord(
        mesh=problem.mesh,
        recipes=evaluation.recipes,
        parameters={name: replace(parameters[name], name=name) for name in order},
        inputs=evaluation.facts["inputs"],
        outputs=evaluation.facts["outputs"],
        layouts=expand_names(folded.repeats, evaluation.facts["layouts"]),
        collectives=decision.collectives,
        remarks=_remarks((*problem.remarks, *decision.remarks, *folded.remarks, *evaluation.remarks)),
        graphs={"CAPTURED": captured, **evaluation.graphs},
        settings=settings_of(problem.options, training=problem.training, device=problem.device),
        cost=evaluation.cost,
        search=decision.search,
        solution=decision.solution,
        timeline=evaluation.timeline,
        repeats=folded.repeats.runs,
        edges=evaluation.edges,
        recomputation=evaluation.recomputation,
        **_paddings(problem),
    )


def _remarks(given: Sequence[Remark]) -> tuple[Remark, ...]:
    remarks = tuple(dict.fromkeys(given))
    for remark in remarks:
        _log.log(logging.DEBUG if remark.routine else logging.INFO, "%s", remark)
    return remarks
