"""Make a plan from a module and its arguments, and the per-device program of the plan; no process group is needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from autoshard.capture.capture import Captured
from autoshard.config.axis_recipes import AUTO, recipes_of, rule_of_thumb
from autoshard.config.progress import Progress, silent
from autoshard.config.settings import settings_of
from autoshard.config.topology import hardware_of
from autoshard.dumps.graph_dump import GraphDump, dump_of
from autoshard.planner.candidates import Choice, compared, search
from autoshard.planner.earlier_plans import replayed
from autoshard.planner.effort import FULL, QUICK, Effort
from autoshard.planner.evaluation import Evaluation, Folded, Recorder, fold, phases_of
from autoshard.planner.memory_limit import check_memory, plan_evaluation
from autoshard.planner.prediction import timed, timed_as
from autoshard.planner.problem import Problem, Recipes, captured_problem
from autoshard.planner.recomputation import fits_surely
from autoshard.planner.request import PlanRequest
from autoshard.planner.state import PlanningState
from autoshard.plans.collectives import Collective
from autoshard.plans.compatibility import check_model
from autoshard.plans.outcome import Cost, Recomputation, Search
from autoshard.plans.record import PlanRecord
from passes.base import Observer, PassContext, Remark
from passes.cost.simulate import Timeline
from passes.errors import MemoryLimitError
from passes.ir.folded_layers import expand_names
from passes.ir.graph import Origin, copy_graph, has_backward
from passes.ir.units import format_seconds
from passes.manager import PassManager
from passes.observers import Logger, Timer, Verifier
from passes.search.prepared import Prepared
from passes.search.solution import Solution

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
    problem: Problem, *, effort: Effort = FULL, progress: Progress = silent, folded: Folded | None = None
) -> tuple[PlanRecord, PlanningState]:
    """Plan a captured model as `plan_ahead` does, without changing its graph. `folded` is the result of `fold`, if
    known.
    """
    if folded is None:
        progress("fold")
        folded = fold(problem, progress=progress)
    decision = _decide(problem, folded, effort, progress)
    problem, folded = decision.variant(problem, folded)
    if problem.options.passes is not None or problem.mesh.hardware is None:
        made = _programmed(problem, folded, decision, Timer()).plan
    else:
        progress("passes")
        decision = _predicted(problem, folded, decision)
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
    problem.captured.trace()
    timer.seconds["capture"] = time.perf_counter() - started

    def followed(folded: Callable[[PlanRecord], Folded]) -> PlanRecord:
        assert plan is not None
        found = plan if isinstance(plan, PlanRecord) else plan()
        settings = settings_of(request.options, training=request.training, device=request.device)
        check_model(found, request.module, folded(found).text, settings)
        return found

    follow = None if plan is None else followed
    return program_problem(problem, follow=follow, progress=progress, observers=observers, timer=timer)


def program_problem(
    problem: Problem,
    *,
    follow: Callable[[Callable[[PlanRecord], Folded]], PlanRecord] | None = None,
    progress: Progress = silent,
    observers: tuple[Observer, ...] = (),
    timer: Timer | None = None,
) -> Planned:
    """Make the program of a captured model as `make_plan` does, without changing its graph; `follow` returns the plan
    to follow, given a function that returns the folded graph that a plan is for.
    """
    timer = timer or Timer()
    started = time.perf_counter()
    progress("fold")
    folded = fold(problem, whole=True)

    def folded_for(plan: PlanRecord) -> Folded:
        return _variant(problem, folded, pads=plan.pads)

    if follow is None:
        decision = _decide_for_run(problem, folded, progress)
    else:
        decision = _decision_of(plan := follow(folded_for), folded_for(plan))
    problem, folded = decision.variant(problem, folded)
    timer.seconds["decide"] = time.perf_counter() - started
    progress("passes")
    return _programmed(problem, folded, decision, timer, observers)


@dataclass(frozen=True)
class _Decision:
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
    folded: Folded | None = None  # that candidates were evaluated on, if another one than was given

    def variant(self, problem: Problem, folded: Folded) -> tuple[Problem, Folded]:
        """Return the problem and the folded graph that were decided on: with dims that are padded, or without."""
        return replace(problem, pads=self.pads), self.folded or folded


def _variant(problem: Problem, folded: Folded, *, pads: bool) -> Folded:
    """Return the folded graph of `problem` with padding or without, given the one with it."""
    return folded if pads or not folded.is_padded else fold(replace(problem, pads=False))


def _decide(problem: Problem, folded: Folded, effort: Effort, progress: Progress) -> _Decision:
    options, recipes = problem.options, recipes_of(problem.options.recipe, problem.mesh)
    if options.recipe != AUTO or options.passes is not None or problem.mesh.size == 1:
        problem.check_batch(recipes)
        return _Decision(recipes, recomputation=_recomputation(problem, folded))
    if problem.mesh.hardware is None:
        problem.check_batch(recipes)
        return _Decision(recipes, recomputation=_recomputation(problem, folded), remarks=(_not_searched(problem),))
    for pads in (True, False) if problem.earlier else ():
        graph = _variant(problem, folded, pads=pads)
        if (replay := replayed(replace(problem, pads=pads), graph)) is not None:
            kept, remarks = replay.recomputation, (replay.remark,)
            return _Decision(
                replay.recipes, replay.solution, recomputation=kept, remarks=remarks, pads=pads, folded=graph
            )
    choice, pads, folded = _best_of_variants(problem, folded, effort, progress)
    for one in choice.search.candidates:
        time = "not simulated" if one.cost is None else format_seconds(one.cost.step_time)
        _log.info("candidate %s: %s%s", one.name, time, f" ({one.note})" if one.note else "")
    _log.info("chose %s in %s", choice.search.chosen, format_seconds(choice.search.seconds))
    evaluation = choice.evaluation
    return _Decision(
        evaluation.recipes,
        choice.solution,
        choice.search,
        evaluation.cost,
        evaluation.timeline,
        evaluation,
        evaluation.recomputation,
        timed(evaluation.facts["collectives"], evaluation.timeline),
        prepared=choice.prepared,
        pads=pads,
        folded=folded,
    )


def _best_of_variants(
    problem: Problem, folded: Folded, effort: Effort, progress: Progress
) -> tuple[Choice, bool, Folded]:
    """Search with padding and, if that changes the graph, without it; return the better plan."""
    if not folded.is_padded:
        return search(problem, folded, effort, progress), True, folded
    found, errors = list[tuple[Choice, bool, Folded]](), list[MemoryLimitError]()
    for pads in (True, False):
        graph = _variant(problem, folded, pads=pads)
        try:
            found.append((search(replace(problem, pads=pads), graph, effort, progress), pads, graph))
        except MemoryLimitError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    best, pads, graph = min(found, key=lambda one: one[0].evaluation.cost.step_time)
    return compared(best, [one for one, *_ in found if one is not best], pads=pads), pads, graph


def _decide_for_run(problem: Problem, folded: Folded, progress: Progress) -> _Decision:
    """Decide as `_decide` does, and simulate the step if the user named the hardware or memory may be short."""
    decision = _decide(problem, folded, QUICK if problem.earlier else FULL, progress)
    problem, folded = decision.variant(problem, folded)
    if problem.options.hardware != "auto" or problem.mesh.hardware != hardware_of("cpu"):
        return _predicted(problem, folded, decision)
    if decision.evaluation is None and _may_need_memory(problem):
        evaluation = plan_evaluation(problem, folded, decision.recipes, decision.solution)
        check_memory(problem, folded, evaluation)
        return replace(decision, recomputation=evaluation.recomputation)
    return decision


def _decision_of(plan: PlanRecord, folded: Folded) -> _Decision:
    return _Decision(
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


def _predicted(problem: Problem, folded: Folded, decision: _Decision) -> _Decision:
    """Add the predicted cost of a step, if the search has not found it and the hardware is known."""
    if decision.evaluation is not None or problem.mesh.hardware is None or problem.options.passes is not None:
        return decision
    evaluation = plan_evaluation(problem, folded, decision.recipes, decision.solution)
    check_memory(problem, folded, evaluation)
    collectives = timed(evaluation.facts["collectives"], evaluation.timeline)
    return replace(
        decision,
        evaluation=evaluation,
        cost=evaluation.cost,
        timeline=evaluation.timeline,
        recomputation=evaluation.recomputation,
        collectives=collectives,
    )


def _not_searched(problem: Problem) -> Remark:
    chosen = ", ".join(f"{axis}: {one}" for axis, one in zip(problem.mesh.names, rule_of_thumb(problem.mesh), strict=True))
    text = (
        f"the figures of this device are not known, so that nothing was searched for: {chosen}; give "
        "Options(hardware='h100') or another preset, or measure it with `python -m autoshard calibrate`"
    )
    first = next(iter(problem.captured.call.tensors))
    return Remark("search", text, Origin(), first.name.replace(".", "_"))


def _programmed(
    problem: Problem, folded: Folded, decision: _Decision, timer: Timer, watching: tuple[Observer, ...] = ()
) -> Planned:
    """Make the per-device program of the whole model, and its plan."""
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
    recorder.facts["collectives"] = timed_as(recorder.facts["collectives"], decision.collectives)
    plan = PlanRecord(
        mesh=problem.mesh,
        recipes=decision.recipes,
        remarks=_remarks((*problem.captured.call.remarks, *decision.remarks, *ctx.remarks)),
        graphs={"CAPTURED": folded.text, **recorder.graphs},
        settings=settings_of(options, training=problem.training, device=problem.device),
        cost=decision.cost,
        search=decision.search,
        solution=decision.solution,
        timeline=decision.timeline,
        edges=tuple(ctx.edges),
        recomputation=decision.recomputation,
        pads=problem.pads,
        **recorder.facts,
    )
    return Planned(plan, problem.captured, gm, timer.seconds)


def _dump(problem: Problem, folded: Folded, decision: _Decision, dump: GraphDump) -> None:
    """Run the passes of the chosen plan once more on the folded graph, to dump it after each pass."""
    assert decision.evaluation is not None
    evaluation, solution = decision.evaluation.folded, decision.solution
    if solution is not None and evaluation.repeats != folded.repeats:
        solution = solution.expanded(folded.repeats)
    gm = copy_graph(evaluation.graph)
    passes = phases_of(problem, gm, decision.recipes, solution, decision.recomputation).passes
    ctx = PassContext(problem.mesh, unknown_ops=problem.options.unknown_ops)
    PassManager(passes, (dump.of(passes, problem.options),)).run(gm, ctx)


def _assembled(problem: Problem, captured: str, evaluation: Evaluation, decision: _Decision) -> PlanRecord:
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
        remarks=_remarks((*problem.captured.call.remarks, *decision.remarks, *folded.remarks, *evaluation.remarks)),
        graphs={"CAPTURED": captured, **evaluation.graphs},
        settings=settings_of(problem.options, training=problem.training, device=problem.device),
        cost=evaluation.cost,
        search=decision.search,
        solution=decision.solution,
        timeline=evaluation.timeline,
        repeats=folded.repeats.runs,
        edges=evaluation.edges,
        recomputation=evaluation.recomputation,
        pads=problem.pads,
    )


def _remarks(given: Sequence[Remark]) -> tuple[Remark, ...]:
    remarks = tuple(dict.fromkeys(given))
    for remark in remarks:
        _log.log(logging.DEBUG if remark.routine else logging.INFO, "%s", remark)
    return remarks
