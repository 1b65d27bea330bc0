"""Produce the solver's candidate: state the problem, solve it for the available memory, and improve the solution.

The solver estimates a plan's memory; the simulator runs its program. If the simulated peak is too high, the solver is
asked for less memory, until its plan fits; if its estimate is too high, it may use more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autoshard.capture.garbage import uncollected
from autoshard.planner.effort import STEPS
from autoshard.planner.evaluation import Evaluation, seeded
from autoshard.planner.prediction import timed
from autoshard.planner.recomputation import memory_budget_of
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from autoshard.plans.collectives import moved_by
from passes.cost.shrink import TRIES, Tried, shrink
from passes.errors import MemoryLimitError
from passes.ir.mesh import Mesh
from passes.search.goal import Goal
from passes.search.model.axis_groups import AxisGroups, can_be_single, coarse_groups, finer_groups, single_axes
from passes.search.model.memory_budget import RecomputationCurve
from passes.search.model.unit_costs import Hiding
from passes.search.prepared import Prepared, least_time, prepare
from passes.search.solution import Solution
from passes.seed import Seed

SHARE = 0.5  # part of the remaining time for a solve; the rest is for simulating solutions and recipes
PROVEN = 0.01  # of the step: no further solution is simulated where none can be shorter by more
ANY = 1.0  # optimality gap as part of a step: accept any plan that fits
OFF = 0.1  # part of a step: by how much the solver's seconds and the simulator's may differ for a good plan
OVERESTIMATED = 0.02  # part of the limit: a plan whose memory is estimated this much over its peak may hide a faster one
CORRECTIONS = 2  # of the estimate at most, as each is solved and simulated
NEAR = 5.0  # errors of the estimate: a plan that is estimated to leave more of the limit is far from it
AMPLE = 2.0  # limits: the memory in which a plan is looked for to measure the estimate where none seems to fit
BEATEN = "no plan that fits is as fast, as the solver's model proves: not simulated"
MISPRICED = 0.02  # part of a step: a plan simulated this much slower was priced too low; corrected prices are solved to it
REPRICINGS = 3  # at most, as each is solved and simulated
FAR_OFF = 0.25  # part of a step: a plan that is simulated this much slower likely has messages that join no others
RUNNERS_UP = 4  # at most that are simulated each time
WORTHWHILE = 2.0 / STEPS  # seconds of a step: to save less is not worth the 2 s that another solve takes


@dataclass(frozen=True)
class Answer:
    """A solution, the problem that it solves, and the evaluation of its program."""

    solution: Solution
    source: Prepared
    evaluation: Evaluation


@dataclass(frozen=True)
class Solved:
    """The state of the solver's search.

    `proven` is the proven lower bound of a step in seconds, by the solver's model (None: not all plans were covered);
    `prepared` is the last problem that was stated (None: there was no time for it). Every plan takes `again` seconds more, for
    what is computed again whatever fits. With `is_beaten`, there is no answer, as all plans are proven to be slower than the best
    elsewhere, by the solver's model.
    """

    answer: Answer | None = None
    proven: float | None = None
    prepared: Prepared | None = None
    again: float = 0.0
    is_beaten: bool = False

    @property
    def objective(self) -> float | None:
        """Return the seconds of the solution's step, by the solver's model."""
        return None if self.answer is None else self.answer.solution.objective + self.again

    @property
    def bound(self) -> float | None:
        """Return the proven bound of the solution.

        None if the solution counts on more recomputation than the plans that the bound covers.
        """
        if self.proven is None or self.answer is None or self.answer.solution.objective < self.proven:
            return None
        return self.proven + self.again

    @property
    def least(self) -> float | None:
        """Return seconds that no plan is simulated faster than; None if no problem was stated."""
        return None if self.source is None else self.source.kernels_bound

    @property
    def source(self) -> Prepared | None:
        """Return the problem of the solution, or if there is none, the last one that was stated."""
        return self.prepared if self.answer is None else self.answer.source


def solve(task: SearchTask, standings: Standings) -> Solved:
    """Enter the solver's plan, if there is time for one.

    First, each mesh axis is used by itself; if the simulated step is far from the proven bound, also with axes in
    groups. Four or more axes are only used in groups: two, then three, of which two make up one of the former. An effort
    that takes the first good plan uses only the best two groups.
    """
    found = _found(task, standings)
    if found.prepared is None:
        standings.decline_late(SOLVED)
    elif found.answer is not None:
        standings.enter(SOLVED, found.answer.evaluation)
    elif _is_beaten(task, found.prepared):
        standings.decline(SOLVED, BEATEN)
        found = replace(found, is_beaten=True)
    return found


def _is_beaten(task: SearchTask, prepared: Prepared) -> bool:
    """Return whether the last search proved that all plans that fit, with what may be computed again, are of no use."""
    goal = _goal(task, memory_budget_of(task.problem, prepared).recomputation)
    is_cut = task.best_elsewhere < float("inf") and _is_whole(prepared)
    return is_cut and prepared.proven.get(goal, 0.0) >= goal.cutoff


def solve_for_least(task: SearchTask, standings: Standings, before: Solved) -> Solved:
    """Enter the solver's plan with the least memory at any cost; `before` is its result that does not fit."""
    mesh = task.problem.mesh
    prepared = stated(task, single_axes(mesh)) if can_be_single(mesh) else before.source
    assert prepared is not None
    curve = memory_budget_of(task.problem, prepared).recomputation
    found = _taken(before, ask(task, standings, prepared, curve, gap=ANY), prepared)
    if found.answer is None or not task.fits(found.answer.evaluation):
        for solution in prepared.smallest(keep_gathered=task.problem.options.keeps_gathered):
            found = replace(found, answer=_answer(task, standings, solution, prepared))
            if found.answer is not None and task.fits(found.answer.evaluation):
                break
    if found.answer is not None:
        standings.enter(SOLVED, found.answer.evaluation)
    return found


def least_of_kernels(task: SearchTask) -> float:
    """Return seconds that no plan is simulated faster than."""
    options = task.problem.options
    with uncollected():
        gm = seeded(task.problem, task.folded, task.no_recipes)
        return least_time(gm, task.problem.mesh, optimizer=options.optimizer, hiding=task.problem.hiding)


def _found(task: SearchTask, standings: Standings) -> Solved:
    whole, grouped = single_axes(task.problem.mesh), coarse_groups(task.problem.mesh)
    if task.effort.takes_first:
        return _solve_grouped(task, standings, Solved(), grouped or (whole,))
    if not can_be_single(task.problem.mesh):
        found = _solve_grouped(task, standings, Solved(), grouped)
        return found if found.source is None else _solve_grouped(task, standings, found, finer_groups(_groups(found.source)))
    prepared = _in_time(task, whole)
    if prepared is None:
        return Solved()
    found = _solve_whole(task, standings, prepared)
    found = replace(found, answer=_repriced(task, standings, found.answer, found.again))
    is_good = found.answer is not None and task.fits(found.answer.evaluation)
    step = found.answer.evaluation.cost.step_time if found.answer is not None and is_good else float("inf")
    if found.proven is None or step > (found.proven + found.again) * (1 + OFF):
        return _solve_grouped(task, standings, found, grouped)
    return found


def _solve_whole(task: SearchTask, standings: Standings, prepared: Prepared) -> Solved:
    """Solve first without recomputation, whose cost the model knows less well, then with it if that may help.

    With `recompute="block"`, values are recomputed in any case.
    """
    if task.problem.options.recompute == "block":
        again = sum(step.nbytes * step.seconds for step in prepared.recomputation) if task.problem.training else 0.0
        curve = memory_budget_of(task.problem, prepared).recomputation
        return replace(_taken(Solved(), ask(task, standings, prepared, curve), prepared), again=again)
    found = _taken(Solved(), ask(task, standings, prepared, ()), prepared)
    held = None if found.answer is None else found.answer.evaluation
    if held is not None and task.fits(held) and held.recomputation is None:
        return found  # what recomputing values would free takes seconds to find out in models of many unlike layers
    curve = memory_budget_of(task.problem, prepared).recomputation
    return _better(task, found, ask(task, standings, prepared, curve), prepared) if curve else found


def _repriced(task: SearchTask, standings: Standings, answer: Answer | None, again: float) -> Answer | None:
    """Solve again with the messages of the answer as dear as they are simulated, if the simulator finds it slower than the solver
    does, until the solver finds none that may be faster than the best as simulated, here or with another padding, or corrected
    prices gain little. Return the best. Where the best with another padding is simulated slower than priced, each solution is
    expected to be as much slower.

    The solver takes each message for one that is joined with others. An answer that is far slower likely has some that are not:
    then all are first priced as if each was sent by itself.

    Every step takes `again` seconds more than the solver says. Where values are computed again, it is not known that messages are
    what takes longer: then only what the search found besides is simulated.
    """
    if answer is None or not task.fits(answer.evaluation) or _overrun(answer, again) <= MISPRICED * answer.solution.objective:
        return answer
    best = last = answer
    if not _may_be_faster(task, last.solution, best, again, task.underpriced_elsewhere):
        return answer
    for number in range(REPRICINGS):
        overrun = _overrun(last, again)
        if overrun <= 0.0 or task.left <= 0:
            break
        best = min([best, *_runners_up(task, standings, last.source, best, again)], key=lambda one: task.rank(one.evaluation))
        if best.evaluation.recomputation is not None:
            break
        is_far_off = number == 0 and overrun > FAR_OFF * last.solution.objective
        if is_far_off:
            prepared = last.source.with_messages_apart()
        else:
            prepared = last.source.corrected_by(last.solution, overrun, _exposed(last))
        found = ask(task, standings, prepared, (), gap=MISPRICED, proves=False)
        if found is None:
            break
        last, before = found, best
        best = min(best, last, key=lambda one: task.rank(one.evaluation))
        if not is_far_off and best.evaluation.cost.step_time > before.evaluation.cost.step_time * (1 - PROVEN):
            break
        if not _may_be_faster(task, last.solution, best, again, task.underpriced_elsewhere):
            break
    return _at_first_prices(best, answer.source)


def _at_first_prices(answer: Answer, source: Prepared) -> Answer:
    """Return an answer with the objective that it has by the prices of `source`, by which the bound is proven."""
    if answer.source is source:
        return answer
    return replace(answer, solution=replace(answer.solution, objective=source.price(answer.solution)))


def _may_be_faster(task: SearchTask, solution: Solution, best: Answer, again: float, underpriced: float = 1.0) -> bool:
    """Return whether a solution would be faster than the best, here or with another padding, if it took `underpriced` times what
    it is priced."""
    simulated = min(best.evaluation.cost.step_time, task.best_elsewhere)
    return (solution.objective + again) * underpriced < simulated - max(PROVEN * simulated, WORTHWHILE)


def _overrun(answer: Answer, again: float) -> float:
    """Return the seconds by which an answer is simulated slower than it is priced; negative where it is faster."""
    return answer.evaluation.cost.step_time - answer.solution.objective - again


def _exposed(answer: Answer) -> dict[str, float]:
    """Return the seconds that the device waits, as simulated, for each parameter and gradient, by the name of its value."""
    waited = defaultdict[str, float](float)
    for one in timed(answer.evaluation.facts["collectives"], answer.evaluation.timeline):
        waited[one.what] += one.exposed or 0.0
    return {value.name: waited[moved_by(value.node)] for value in answer.source.factor_graph.values if value.hides}


def _runners_up(
    task: SearchTask, standings: Standings, source: Prepared, best: Answer, again: float
) -> Iterator[Answer]:
    """Yield what the last search of a problem found besides its answer, if it may be faster than the best."""
    for solution in islice(source.runners_up(), RUNNERS_UP):
        if _may_be_faster(task, solution, best, again):
            yield _answer(task, standings, solution, source)


def _solve_grouped(task: SearchTask, standings: Standings, before: Solved, ways: Sequence[AxisGroups]) -> Solved:
    """Solve with several mesh axes used alike, in the grouping that is best by the solver's model."""
    gap, problems = task.effort.grouped_gap, [*filter(None, (_in_time(task, way) for way in ways))]
    if not problems:
        return before
    last = problems[-1]
    if len(problems) > 1:
        steps = {id(prepared): _first_step(task, prepared, gap) for prepared in problems}
        problems.sort(key=lambda prepared: steps[id(prepared)])
    answer = ask(task, standings, problems[0], memory_budget_of(task.problem, problems[0]).recomputation, gap=gap)
    answer = answer if task.effort.takes_first else _repriced(task, standings, answer, before.again)
    return replace(_better(task, before, answer, problems[0]), prepared=last)


def _first_step(task: SearchTask, prepared: Prepared, gap: float) -> float:
    """Return the seconds of the first plan that the solver finds to fit."""
    try:
        return next(prepared.solutions(_goal(task, memory_budget_of(task.problem, prepared).recomputation, gap=gap))).objective
    except MemoryLimitError:
        return float("inf")


def _taken(before: Solved, answer: Answer | None, prepared: Prepared) -> Solved:
    """Return `before` with the answer to `prepared`, if there is one, and its proven bound."""
    if answer is None:
        return replace(before, prepared=prepared)
    return Solved(answer, answer.solution.bound if _is_whole(prepared) else before.proven, prepared, before.again)


def _is_whole(prepared: Prepared) -> bool:
    """Return whether each mesh axis is used by itself, so that all plans are considered."""
    return _groups(prepared) == single_axes(prepared.node_costs.unit_costs.mesh)


def _groups(prepared: Prepared) -> AxisGroups:
    return prepared.skeleton.axis_groups


def _better(task: SearchTask, before: Solved, answer: Answer | None, prepared: Prepared) -> Solved:
    """Return the answer as `_taken` does, but keep the one found before if it is as good."""
    found = _taken(before, answer, prepared)
    if before.answer is None or answer is None:
        return found
    is_as_good = task.rank(before.answer.evaluation) <= task.rank(answer.evaluation)
    return replace(found, answer=before.answer) if is_as_good else found


def _in_time(task: SearchTask, axes: AxisGroups) -> Prepared | None:
    return stated(task, axes, time.perf_counter() + task.left) if task.left > 0 else None


def stated(task: SearchTask, axes: AxisGroups, deadline: float = float("inf")) -> Prepared | None:
    """State the problem for axes in groups; None after the deadline."""
    known = task.folded.prepared
    seed = task.problem.seed(task.folded.graph, task.no_recipes)
    key = seed, task.problem.mesh, axes, task.problem.options.optimizer, task.problem.hiding
    if key not in known:
        try:
            with uncollected():
                known[key] = _prepared(task, *key, deadline)
        except TimeoutError:
            return None
    return known[key]


def _prepared(
    task: SearchTask,
    seed: Seed,
    mesh: Mesh,
    axes: AxisGroups,
    optimizer: str | None,
    hiding: Hiding,
    deadline: float,
) -> Prepared:
    """Prepare the problem, reusing one that was stated for the same mesh or the same groups."""
    known = task.folded.prepared
    similar = [(one, prepared) for one, prepared in known.items() if (one[0], *one[3:]) == (seed, optimizer, hiding)]
    for (_, other, groups, *_), prepared in similar:
        if (other.names, other.sizes, groups) == (mesh.names, mesh.sizes, axes):
            return prepared.on(mesh, deadline=deadline)
    for (_, other, *_), prepared in similar:
        if other == mesh:
            return prepared.using(axes, deadline=deadline)
    gm = seeded(task.problem, task.folded, task.no_recipes)
    return prepare(gm, mesh, axes, optimizer=optimizer, hiding=hiding, deadline=deadline)


def _goal(task: SearchTask, curve: RecomputationCurve, limit: float | None = None, gap: float | None = None) -> Goal:
    """Return the goal of a solve; by default, to fit the limit within the effort's optimality gap."""
    left = task.left * SHARE
    return Goal(
        float(task.limit) if limit is None else limit,
        task.effort.gap if gap is None else gap,
        None if left == float("inf") else left,
        task.problem.options.keeps_gathered,
        curve,
        task.best_elsewhere * (1 + OFF),
        steps=STEPS,
    )


def ask(
    task: SearchTask,
    standings: Standings,
    prepared: Prepared,
    curve: RecomputationCurve,
    *,
    gap: float | None = None,
    proves: bool = True,
) -> Answer | None:
    """Solve for less and less memory, while the simulated peak is higher than the solver's estimate.

    Each attempt reduces the limit by the error of the estimate. A plan that fits is then proven or improved, unless the first
    is enough. Returns None if the solver finds no plan at all, and the last plan if none fits.
    """

    def attempt(limit: float) -> Tried[Answer] | None:
        found = prepared.solutions(_goal(task, curve, limit, gap))
        try:
            solution = next(found)
        except MemoryLimitError:
            return None
        answer = _answer(task, standings, solution, prepared)
        if task.fits(answer.evaluation):
            improves = proves and _is_whole(prepared) and not task.effort.takes_first
            return Tried(_improved(task, standings, answer, found) if improves else answer, None)
        peak = answer.evaluation.cost.peak_memory
        missed = peak + answer.evaluation.freed - solution.memory
        return Tried(answer, min(limit - (peak - task.limit), task.limit - missed))

    def shrunk(limit: float, tries: int = TRIES) -> Answer | None:
        infeasible = -sum(step.nbytes for step in curve)
        return shrink(limit, attempt, none=infeasible, is_over=lambda: task.left <= 0, tries=tries)

    answer = shrunk(float(task.limit))
    is_enough = task.effort.takes_first or not proves or task.left <= 0
    return answer if is_enough else _with_estimate_corrected(task, answer, shrunk)


def _with_estimate_corrected(task: SearchTask, answer: Answer | None, shrunk: Callable[..., Answer | None]) -> Answer | None:
    """Ask `shrunk` again for more memory where the solver estimates more than the simulator finds, and memory may be short.

    Returns the better answer.

    Without an answer, a plan in more memory than there is shows by how much the estimate is off.
    """
    limit = float(task.limit)
    measured = shrunk(limit * AMPLE, tries=1) if answer is None else answer
    if measured is None or (answer is None and task.fits(measured.evaluation)):
        return measured
    if answer is not None and not (task.fits(answer.evaluation) and limit - answer.solution.memory < NEAR * _excess(answer)):
        return answer
    allowed = limit
    for _ in range(CORRECTIONS):
        more = limit + _excess(measured)
        if more <= allowed + OVERESTIMATED * limit or task.left <= 0:
            break
        found, allowed = shrunk(more), more
        measured, answer = found or measured, _faster(task, answer, found)
    return answer


def _excess(answer: Answer) -> float:
    """Return the bytes by which the solver estimates more memory than the step needs, as simulated."""
    return answer.solution.memory - answer.evaluation.least_memory - answer.evaluation.freed


def _faster(task: SearchTask, answer: Answer | None, other: Answer | None) -> Answer | None:
    """Return the better of an answer and another that was found in more memory, with the lower bound, which covers more plans."""
    if answer is None or other is None:
        return answer or other
    best = min(answer, other, key=lambda one: task.rank(one.evaluation))
    return replace(best, solution=replace(best.solution, bound=min(answer.solution.bound, other.solution.bound)))


def _answer(task: SearchTask, standings: Standings, solution: Solution, source: Prepared) -> Answer:
    answer = Answer(solution, source, task.evaluate(task.no_recipes, solution))
    standings.see(answer.evaluation)
    return answer


def _improved(task: SearchTask, standings: Standings, answer: Answer, found: Iterator[Solution]) -> Answer:
    """Improve the answer with a longer search until it is proven, and raise its proven bound.

    A new solution is only taken if the simulator agrees that it is better. None is looked for where the answer is simulated far
    slower than priced, as prices will be corrected.
    """
    if _overrun(answer, 0.0) > FAR_OFF * answer.solution.objective:
        return answer
    for solution in found:
        held = answer.solution
        is_enough = held.objective * (1 - PROVEN) <= solution.bound
        if not is_enough and replace(solution, bound=held.bound) != held:
            other = _answer(task, standings, solution, answer.source)
            if task.fits(other.evaluation) and other.evaluation.cost.step_time <= answer.evaluation.cost.step_time:
                answer = other
        answer = replace(answer, solution=replace(answer.solution, bound=max(held.bound, solution.bound)))
    return answer
