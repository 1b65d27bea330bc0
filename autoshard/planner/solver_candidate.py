"""The candidate of the solver: the problem is stated, solved for the memory that the simulator finds it to need, and improved.

The solver estimates a plan's memory; the simulator runs its program. Where the latter finds a higher peak than fits, the
solver is asked for less memory, until its plan fits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.capture.garbage import uncollected
from autoshard.planner.evaluation import Evaluation, seeded
from autoshard.planner.recomputation import memory_budget_of
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from passes.errors import MemoryLimitError
from passes.ir.mesh import Mesh
from passes.search.goal import Goal
from passes.search.model.axis_groups import AxisGroups, coarse_groups, single_axes
from passes.search.model.memory_budget import RecomputationCurve
from passes.search.optimize import PROOF
from passes.search.prepared import Prepared, prepare
from passes.search.solution import Solution
from passes.seed import Seed

TRIES = 4  # how often the solver is asked for less memory, where the simulator finds a higher peak than it estimated
SHARE = 0.5  # of the time left that the solver may take, as what it finds and recipes are to be simulated
ANY = 1.0  # of a step, as a gap: any plan that fits will do
OFF = 0.1  # of a step: by how much more a simulated step may be longer than what is proven, or was solved for, to be a good one


@dataclass(frozen=True)
class Answer:
    """A solution, the problem that it is of, and what its program was found to cost."""

    solution: Solution
    source: Prepared
    evaluation: Evaluation


@dataclass(frozen=True)
class Solved:
    """What the solver found. `proven` are seconds that no plan is better than by its model (None: not all were looked at);
    `prepared` is the problem as it was stated last (None: there was no time for it)."""

    answer: Answer | None = None
    proven: float | None = None
    prepared: Prepared | None = None

    @property
    def bound(self) -> float | None:
        """Return what is proven of the solution; None where it counts on more recomputation than the proof does."""
        if self.proven is None or self.answer is None or self.answer.solution.objective < self.proven:
            return None
        return self.proven

    @property
    def source(self) -> Prepared | None:
        """The problem that the solution is of, or else the one that was stated."""
        return self.prepared if self.answer is None else self.answer.source


def solve(task: SearchTask, standings: Standings) -> Solved:
    """Enter the solved placement, as far as there is time: with each axis by itself and, where the simulator finds that far
    from what is proven, with axes in groups. Where the first good plan will do, in the best groups alone."""
    found = _found(task, standings)
    if found.prepared is None:
        standings.decline_late(SOLVED)
    if found.answer is not None:
        standings.enter(SOLVED, found.answer.evaluation)
    return found


def solve_for_least(task: SearchTask, standings: Standings, before: Solved) -> Solved:
    """Enter what the solver finds to take little memory, whatever it costs; `before` is what it found that does not fit."""
    prepared = stated(task, single_axes(task.problem.mesh))
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


def _found(task: SearchTask, standings: Standings) -> Solved:
    whole, grouped = single_axes(task.problem.mesh), coarse_groups(task.problem.mesh)
    if task.effort.takes_first:
        return _solve_grouped(task, standings, Solved(), grouped or (whole,))
    prepared = _in_time(task, whole)
    if prepared is None:
        return Solved()
    found = _solve_whole(task, standings, prepared)
    is_good = found.answer is not None and task.fits(found.answer.evaluation)
    step = found.answer.evaluation.cost.step_time if found.answer is not None and is_good else float("inf")
    if found.proven is None or step > found.proven * (1 + OFF):
        return _solve_grouped(task, standings, found, grouped)
    return found


def _solve_whole(task: SearchTask, standings: Standings, prepared: Prepared) -> Solved:
    """First without counting on anything to be computed again, as what that takes is known less well; unless it is
    computed again in any case."""
    curve = memory_budget_of(task.problem, prepared).recomputation
    if task.problem.options.recompute == "block":
        return _taken(Solved(), ask(task, standings, prepared, curve), prepared)
    found = _taken(Solved(), ask(task, standings, prepared, ()), prepared)
    held = None if found.answer is None else found.answer.evaluation
    if curve and (held is None or not task.fits(held) or held.recomputation is not None):
        return _better(task, found, ask(task, standings, prepared, curve), prepared)
    return found


def _solve_grouped(task: SearchTask, standings: Standings, before: Solved, ways: Sequence[AxisGroups]) -> Solved:
    """A plan that uses axes alike in one of some ways: the best of those by the solver's model."""
    gap, problems = task.effort.grouped_gap, [*filter(None, (_in_time(task, way) for way in ways))]
    if not problems:
        return before
    last = problems[-1]
    if len(problems) > 1:
        steps = {id(prepared): _first_step(task, prepared, gap) for prepared in problems}
        problems.sort(key=lambda prepared: steps[id(prepared)])
    answer = ask(task, standings, problems[0], memory_budget_of(task.problem, problems[0]).recomputation, gap=gap)
    return replace(_better(task, before, answer, problems[0]), prepared=last)


def _first_step(task: SearchTask, prepared: Prepared, gap: float) -> float:
    """Seconds of the first plan that the solver finds to fit."""
    try:
        return next(prepared.solutions(_goal(task, memory_budget_of(task.problem, prepared).recomputation, gap=gap))).objective
    except MemoryLimitError:
        return float("inf")


def _taken(before: Solved, answer: Answer | None, prepared: Prepared) -> Solved:
    """`before` with an answer to `prepared`, if there is one, and what is proven of it."""
    if answer is None:
        return replace(before, prepared=prepared)
    is_whole = prepared.skeleton.axis_groups == single_axes(prepared.node_costs.unit_costs.mesh)
    return Solved(answer, answer.solution.bound if is_whole else before.proven, prepared)


def _better(task: SearchTask, before: Solved, answer: Answer | None, prepared: Prepared) -> Solved:
    """Take the answer, unless what was found before is as good."""
    found = _taken(before, answer, prepared)
    if before.answer is None or answer is None:
        return found
    is_as_good = task.rank(before.answer.evaluation) <= task.rank(answer.evaluation)
    return replace(found, answer=before.answer) if is_as_good else found


def _in_time(task: SearchTask, axes: AxisGroups) -> Prepared | None:
    return stated(task, axes, time.perf_counter() + task.left) if task.left > 0 else None


def stated(task: SearchTask, axes: AxisGroups, deadline: float = float("inf")) -> Prepared | None:
    """State the problem with axes in groups; None past the deadline."""
    known, key = task.folded.prepared, (task.problem.seed(task.folded.graph, task.no_recipes), task.problem.mesh, axes)
    if key not in known:
        try:
            with uncollected():
                known[key] = _prepared(task, *key, deadline)
        except TimeoutError:
            return None
    return known[key]


def _prepared(task: SearchTask, seed: Seed, mesh: Mesh, axes: AxisGroups, deadline: float) -> Prepared:
    """The problem, made of one that was stated for the same axes if there is one."""
    known = task.folded.prepared
    for (other, its, alike), prepared in known.items():
        if (other, its.names, its.sizes, alike) == (seed, mesh.names, mesh.sizes, axes):
            return prepared.on(mesh, deadline=deadline)
    for (other, its, _), prepared in known.items():
        if (other, its) == (seed, mesh):
            return prepared.using(axes, deadline=deadline)
    return prepare(seeded(task.problem, task.folded, task.no_recipes), mesh, axes, deadline=deadline)


def _goal(task: SearchTask, curve: RecomputationCurve, asked: float | None = None, gap: float | None = None) -> Goal:
    """Return what is asked of a search: by default, to fit the limit and to be as good as the effort has it."""
    left = task.left * SHARE
    return Goal(
        float(task.limit) if asked is None else asked,
        task.effort.gap if gap is None else gap,
        None if left == float("inf") else left,
        task.problem.options.keeps_gathered,
        curve,
    )


def ask(
    task: SearchTask, standings: Standings, prepared: Prepared, curve: RecomputationCurve, *, gap: float | None = None
) -> Answer | None:
    """Solve for less memory, while the simulator finds a higher peak than the solver estimated.

    By as much as it estimated too little; halfway to where the solver finds none, if that is not as far. Of the plan that
    fits, it is proven how good it is, or a better one found. None where the solver finds no plan at all; the last plan
    where none fits.
    """
    none, some, asked = -sum(step.nbytes for step in curve), float(task.limit), float(task.limit)
    answer: Answer | None = None
    for attempt in range(TRIES):
        if attempt > 0 and task.left <= 0:
            break
        found = prepared.solutions(_goal(task, curve, asked, gap))
        try:
            solution = next(found)
        except MemoryLimitError:
            if attempt == 0:
                break
            none, asked = asked, (asked + some) / 2
            continue
        answer = _answer(task, standings, solution, prepared)
        if task.fits(answer.evaluation):
            is_whole = prepared.skeleton.axis_groups == single_axes(task.problem.mesh)
            return _improved(task, standings, answer, found) if is_whole and not task.effort.takes_first else answer
        some, peak = asked, answer.evaluation.cost.peak_memory
        missed = peak + answer.evaluation.freed - solution.memory
        asked = max(min(asked - (peak - task.limit), task.limit - missed), (none + asked) / 2)
    return answer


def _answer(task: SearchTask, standings: Standings, solution: Solution, source: Prepared) -> Answer:
    answer = Answer(solution, source, task.evaluate(task.no_recipes, solution))
    standings.see(answer.evaluation)
    return answer


def _improved(task: SearchTask, standings: Standings, answer: Answer, found: Iterator[Solution]) -> Answer:
    """Take what a longer search finds, if what is held is not proven by then, where the simulator agrees that it is
    better; and what it proves."""
    for solution in found:
        held = answer.solution
        is_enough = held.objective * (1 - PROOF) <= solution.bound
        if not is_enough and replace(solution, bound=held.bound) != held:
            other = _answer(task, standings, solution, answer.source)
            if task.fits(other.evaluation) and other.evaluation.cost.step_time <= answer.evaluation.cost.step_time:
                answer = other
        answer = replace(answer, solution=replace(answer.solution, bound=max(held.bound, solution.bound)))
    return answer
