"""Which plan is best: the solved placement, or an expert's recipe, judged by the simulator."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autoshard.capture.garbage import uncollected
from autoshard.config.progress import Progress
from autoshard.planner.evaluation import Folded, Judged, in_chunks, judge, seeded
from autoshard.planner.prediction import memory_of
from autoshard.planner.problem import Problem, Recipes
from autoshard.planner.recipe_candidates import Experts
from autoshard.planner.recomputation import room_for
from autoshard.plans.outcome import Candidate, Cost, Search
from passes.errors import InputError, MemoryLimitError
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes, format_seconds
from passes.search.goal import Goal
from passes.search.model.axis_groups import AxisGroups, coarse_groups, format_axis_groups, single_axes
from passes.search.model.memory_budget import RecomputationCurve
from passes.search.optimize import PROOF
from passes.search.prepared import Prepared, prepare
from passes.search.solution import Solution
from passes.seed import Seed

SOLVED = "solved"
AGAIN = "layers computed again in the backward"
KEPT = "slower though nothing is computed again: not made to fit"
TRIES = 4  # how often the solver is asked for less memory, where the simulator finds a higher peak than it estimated
SHARE = 0.5  # of the time left that the solver may take, as what it finds and recipes are to be simulated
ANY = 1.0  # of a step: any plan that fits will do
QUICK = 0.1  # of a step: how far from proven a quick answer may be
BUNDLED = 0.02  # of a step: how far from proven a plan may be for which axes were bundled
OFF = 0.1  # of a step: a plan whose simulated step is longer by more, than a quick answer's by the solver's model or than what
# it has proven, is no good one, perhaps
STEP = 0.05  # of a memory limit: how far below the smallest known one another is tried
NEAR = 0.5  # part of a step: a recipe that the solver finds slower by more is not simulated. It finds them up to a third too
# slow where memory is not short: `zero2+megatron` of 8B 435 ms (benchmarks.planning_time), simulated 326 ms (benchmarks.grid)


@dataclass(frozen=True)
class Choice:
    """The best candidate and how it was found."""

    judged: Judged
    solution: Solution | None  # None: a recipe's
    search: Search
    prepared: Prepared | None  # the problem that the solution is of; None: there was no time for it


def search(
    problem: Problem, folded: Folded, progress: Progress, *, every: bool = False, quick: bool = False
) -> Choice:
    """The candidate with the shortest simulated step of those that fit in memory; of equal ones the first.

    Recipes that the solver's own model finds hopeless are not simulated, unless `every` is; nor is any once the time limit
    is over and there is a plan that fits. A `quick` search takes the first good plan of the solver's; beside one that the
    simulator finds slower than the solver did, it tries the best recipe. Raises MemoryLimitError where nothing fits: with
    what takes the memory, and the smallest limit that would do.
    """
    contest = _Contest(problem, folded, quick=quick)
    progress(SOLVED)
    contest.solve()
    contest.try_recipes(progress, every=every)
    if contest.best is None:
        contest.try_least()
    if contest.best is None:
        assert contest.least is not None
        lines = contest.least.largest(problem.mesh)
        raise MemoryLimitError("\n  ".join((_too_small(contest.limit, *_smallest(contest)), *lines)))
    contest.cut()
    return contest.choice()


@dataclass
class _Contest:
    """Candidates as they are judged."""

    problem: Problem
    folded: Folded
    quick: bool = False
    started: float = field(default_factory=time.perf_counter)
    judged: dict[str, Judged] = field(default_factory=dict)
    declined: list[Candidate] = field(default_factory=list)
    prepared: Prepared | None = None  # the problem as it was stated last
    solution: Solution | None = None  # that SOLVED stands for
    source: Prepared | None = None  # the problem that it is of
    proven: float | None = None  # seconds that no plan is better than, by the solver's model; None: not all were looked at
    least: Judged | None = None  # of all judged, the one with the lowest peak
    best: str | None = None  # of those that fit

    @property
    def limit(self) -> int:
        """Bytes of memory of one device."""
        return self.problem.options.memory_bytes(memory_of(self.problem.mesh))

    @property
    def experts(self) -> Experts:
        return Experts(self.problem, self.folded)

    @property
    def best_time(self) -> float:
        return self.judged[self.best].cost.step_time if self.best is not None else float("inf")

    @property
    def left(self) -> float:
        """Seconds of the time limit."""
        limit = self.problem.options.time_limit
        return float("inf") if limit is None else limit - (time.perf_counter() - self.started)

    def enter(self, name: str, judged: Judged) -> bool:
        """Whether it fits."""
        self.judged[name] = judged
        cost = judged.cost
        if self.least is None or cost.peak_memory < self.least.cost.peak_memory:
            self.least = judged
        fits = cost.peak_memory <= self.limit
        if fits and cost.step_time < self.best_time:
            self.best = name
        return fits

    def enter_solved(self, solution: Solution, source: Prepared) -> bool:
        self.solution, self.source = solution, source
        return self.enter(SOLVED, judge(self.problem, self.folded, self._unpinned, solution, quick=self.quick))

    @property
    def _unpinned(self) -> Recipes:
        return (None,) * self.problem.mesh.ndim

    @property
    def _keep(self) -> bool | None:
        return self.problem.options.keeps_gathered

    def solve(self) -> None:
        """The solved placement, as far as there is time for it: with each axis by itself and, where the simulator finds that
        far from what is proven, with axes in bundles; of a quick answer, in the best bundles."""
        whole, bundled = single_axes(self.problem.mesh), coarse_groups(self.problem.mesh)
        if self.quick:
            self._solve_quickly(bundled or (whole,))
        elif (prepared := self._in_time(whole)) is not None:
            self._solve(prepared)
            if self.proven is None or self.best_time > self.proven * (1 + OFF):
                self._solve_quickly(bundled)
        if self.prepared is None:
            self._decline(SOLVED)

    def _solve_quickly(self, ways: Sequence[AxisGroups]) -> None:
        """A plan that uses axes alike in one of some ways: the best of those by the solver's model."""
        gap, stated = QUICK if self.quick else BUNDLED, [*filter(None, map(self._in_time, ways))]
        if len(stated) > 1:
            steps = {id(prepared): self._first_step(prepared, gap) for prepared in stated}
            stated.sort(key=lambda prepared: steps[id(prepared)])
        for prepared in stated[:1]:
            self.ask_again(prepared, room_for(self.problem, prepared).recomputation, gap=gap)

    def _first_step(self, prepared: Prepared, gap: float) -> float:
        """Seconds of the first plan that the solver finds to fit."""
        try:
            return next(prepared.solutions(self._goal(room_for(self.problem, prepared).recomputation, gap=gap))).objective
        except MemoryLimitError:
            return float("inf")

    def _solve(self, prepared: Prepared) -> None:
        """First without counting on anything to be computed again, as what that takes is known less well; unless it is
        computed again in any case."""
        relief = room_for(self.problem, prepared).recomputation
        if self.problem.options.recompute == "block":
            self.ask(prepared, relief)
            return
        self.ask(prepared, ())
        held = self.judged.get(SOLVED)
        if relief and (held is None or self.best is None or held.recomputation is not None):
            self.ask_again(prepared, relief)

    def _in_time(self, bundles: AxisGroups) -> Prepared | None:
        return self.prepare(bundles, time.perf_counter() + self.left) if self.left > 0 else None

    def prepare(self, bundles: AxisGroups, deadline: float = float("inf")) -> Prepared | None:
        """State the problem, unless it is past the deadline."""
        key = self._seed(self._unpinned), self.problem.mesh, bundles
        if key not in self.folded.prepared:
            try:
                with uncollected():
                    self.folded.prepared[key] = self._prepared(*key, deadline)
            except TimeoutError:
                return None
        self.prepared = self.folded.prepared[key]
        return self.prepared

    def _prepared(self, seed: Seed, mesh: Mesh, bundles: AxisGroups, deadline: float) -> Prepared:
        """The problem, made of one that was stated for the same axes if there is one."""
        for (other, axes, alike), prepared in self.folded.prepared.items():
            if (other, axes.names, axes.sizes, alike) == (seed, mesh.names, mesh.sizes, bundles):
                return prepared.on(mesh, deadline=deadline)
        for (other, axes, _), prepared in self.folded.prepared.items():
            if (other, axes) == (seed, mesh):
                return prepared.using(bundles, deadline=deadline)
        return prepare(seeded(self.problem, self.folded, self._unpinned), mesh, bundles, deadline=deadline)

    def _seed(self, recipes: Recipes) -> Seed:
        return self.problem.seed(self.folded.graph, recipes)

    def ask_again(self, prepared: Prepared, relief: RecomputationCurve, *, gap: float | None = None) -> None:
        """As `ask`, but what was found before stays if it is as good."""
        held = self.solution, self.source, self.judged.pop(SOLVED, None)
        self.best, self.solution, self.source = self._fastest(), None, None
        self.ask(prepared, relief, gap=gap)
        before, now = held[-1], self.judged.get(SOLVED)
        if before is not None and (now is None or self._rank(before) <= self._rank(now)):
            self.solution, self.source, self.judged[SOLVED] = *held[:2], before
        self.best = self._fastest()

    def _goal(self, relief: RecomputationCurve, asked: float | None = None, gap: float | None = None) -> Goal:
        """What is asked of a search: by default, to fit the limit and to be as good as the answer has to be."""
        left = self.left * SHARE
        asked = float(self.limit) if asked is None else asked
        gap = (QUICK if self.quick else Goal.gap) if gap is None else gap
        return Goal(asked, gap, None if left == float("inf") else left, self._keep, relief)

    def ask(self, prepared: Prepared, relief: RecomputationCurve, *, gap: float | None = None) -> None:
        """Solve for less memory, while the simulator finds a higher peak than the solver estimated.

        By as much as it estimated too little; halfway to where the solver finds none, if that is not as far. Of the plan that
        fits, it is proven how good it is, or a better one found.
        """
        is_whole = prepared.skeleton.axis_groups == single_axes(self.problem.mesh)
        none, some, asked = -sum(step.nbytes for step in relief), float(self.limit), float(self.limit)
        for attempt in range(TRIES):
            if attempt > 0 and self.left <= 0:
                break
            found = prepared.solutions(self._goal(relief, asked, gap))
            try:
                solution = next(found)
            except MemoryLimitError:
                if attempt == 0:
                    break
                none, asked = asked, (asked + some) / 2
                continue
            if self.enter_solved(solution, prepared):
                if not self.quick and is_whole:
                    self.improve(found, prepared)
                break
            some, judged = asked, self.judged[SOLVED]
            excess = judged.cost.peak_memory - self.limit
            missed = judged.cost.peak_memory + judged.freed - solution.memory
            asked = max(min(asked - excess, self.limit - missed), (none + asked) / 2)
        if self.solution is not None and is_whole:
            self.proven = self.solution.bound

    def improve(self, found: Iterator[Solution], prepared: Prepared) -> None:
        """Take what a longer search finds, if what is held is not proven by then, where the simulator agrees that it is
        better; and what it proves."""
        for solution in found:
            held, judged = self.solution, self.judged[SOLVED]
            assert held is not None
            is_enough = held.objective * (1 - PROOF) <= solution.bound
            is_other = not is_enough and replace(solution, bound=held.bound) != held
            if is_other:
                fits, step = self.enter_solved(solution, prepared), self.judged[SOLVED].cost.step_time
                if not fits or step > judged.cost.step_time:
                    self.solution, self.judged[SOLVED] = held, judged
            self.solution = replace(self.solution or held, bound=max(held.bound, solution.bound))

    def try_least(self) -> None:
        """What the solver finds to take little memory, whatever it costs."""
        prepared = self.prepare(single_axes(self.problem.mesh))
        assert prepared is not None
        self.ask(prepared, room_for(self.problem, prepared).recomputation, gap=ANY)
        if self.best is not None:
            return
        for solution in prepared.smallest(keep_gathered=self._keep):
            if self.enter_solved(solution, prepared):
                break

    def try_recipes(self, progress: Progress, *, every: bool) -> None:
        """The experts', those that look best first; for a quick answer no more than it needs."""
        if self.is_answered:
            self.declined += [_not_needed(name) for name, _ in self.experts]
            return
        estimates: dict[str, tuple[float, Recipes]] = {}
        for name, recipes in self.experts:
            try:
                self.problem.check_batch(recipes)
            except InputError as error:
                self.declined.append(Candidate(name, None, fits=False, note=str(error)))
                continue
            seconds, fits = 0.0, True  # as far as is known
            if self.prepared is not None and self.left > 0:
                seconds, fits = self.experts.estimate(recipes, self.prepared)
            if self.best is not None and self.quick and not fits:
                note = "takes too much memory by the solver's model: not simulated; plan.replan(..., prove=True) does"
                self.declined.append(Candidate(name, None, fits=False, note=note))
                continue
            estimates[name] = seconds, recipes
            if self.best is not None and not every and (state := self.experts.state(recipes)) > self.limit:
                note = f"takes {format_bytes(state)} for parameters, gradients and optimizer: not simulated"
                self.declined.append(Candidate(name, None, fits=False, note=note))
                del estimates[name]
        for name, (estimate, recipes) in sorted(estimates.items(), key=lambda item: item[1][0]):
            if self.best is not None and self.left <= 0:
                self._decline(name)
            elif self.quick and self.best is not None and len(self.judged) > 1:
                self.declined.append(_not_needed(name))
            elif not every and estimate > self.best_time * (1 + NEAR):
                note = f"about {format_seconds(estimate)} by the solver's model: not simulated"
                self.declined.append(Candidate(name, None, fits=False, note=note))
            else:
                progress(name)
                worst = float("inf") if every else self.best_time
                self.enter(name, judge(self.problem, self.folded, recipes, worst=worst, quick=self.quick))

    def cut(self) -> None:
        """Count what is sent in chunks, for the best and for those that could be better with it."""
        fitting = [name for name, judged in self.judged.items() if judged.cost.peak_memory <= self.limit]
        for name in sorted(fitting, key=lambda name: self.judged[name].cost.step_time):
            if name == self.best or self.judged[name].least_time < self.best_time:
                self.judged[name] = in_chunks(self.problem, self.judged[name])
                self.best = self._fastest() or self.best

    def _fastest(self) -> str | None:
        """Of those that fit."""
        fitting = [name for name, judged in self.judged.items() if judged.cost.peak_memory <= self.limit]
        return min(fitting, key=lambda name: self.judged[name].cost.step_time, default=None)

    def _rank(self, judged: Judged) -> tuple[float, float]:
        cost = judged.cost
        return (0.0, cost.step_time) if cost.peak_memory <= self.limit else (float(cost.peak_memory), 0.0)

    @property
    def is_answered(self) -> bool:
        """Whether the solver's plan is a quick answer that the simulator agrees with."""
        if not self.quick or self.best != SOLVED or self.solution is None:
            return False
        return self.best_time <= self.solution.objective * (1 + OFF)

    def _decline(self, name: str) -> None:
        note = f"the time limit of {self.problem.options.time_limit} s was over"
        self.declined.append(Candidate(name, None, fits=False, note=note))

    def choice(self) -> Choice:
        assert self.best is not None
        candidates = [
            Candidate(name, one.cost, fits=one.cost.peak_memory <= self.limit, note="; ".join(self._notes(name, one)))
            for name, one in self.judged.items()
        ]
        return Choice(
            self.judged[self.best],
            self.solution if self.best == SOLVED else None,
            Search(
                self.best,
                (*candidates, *self.declined),
                self.limit,
                self.solution.objective if self.solution is not None else None,
                self._bound,
                time.perf_counter() - self.started,
            ),
            self.source or self.prepared,
        )

    @property
    def _bound(self) -> float | None:
        """What is proven of the solution; nothing of one that counts on more being computed again than what was proven does."""
        if self.proven is None or self.solution is None or self.solution.objective < self.proven:
            return None
        return self.proven

    def _notes(self, name: str, judged: Judged) -> Iterator[str]:
        groups = self.source.skeleton.axis_groups if name == SOLVED and self.source is not None else ()
        if axes := format_axis_groups(groups, self.problem.mesh):
            yield f"{axes} used alike"
        is_auto = self.problem.options.recompute == "auto" and self.problem.training
        is_slower = judged.cost.peak_memory > self.limit and judged.cost.step_time >= self.best_time
        if judged.recomputation is not None:
            yield AGAIN
        elif is_auto and is_slower:
            yield KEPT


def _not_needed(name: str) -> Candidate:
    return Candidate(name, None, fits=False, note="a quick answer: not simulated; plan.replan(..., prove=True) does")


def _smallest(failed: _Contest) -> tuple[int, Cost]:
    """The smallest limit that a plan was found for, to a step of `STEP`, and what that plan costs.

    What of the candidates takes least fits in its peak, as all of them are tried again for any limit; below that, so does
    what the solver finds when it is asked for that very limit.
    """
    assert failed.least is not None
    least, cost = failed.least.cost.peak_memory, failed.least.cost
    while (lower := int(least * (1 - STEP))) > failed.limit and failed.left > 0:
        options = replace(failed.problem.options, memory_limit=lower)
        contest = _Contest(
            replace(failed.problem, options=options), failed.folded, started=failed.started, prepared=failed.prepared
        )
        assert failed.prepared is not None
        contest.ask(failed.prepared, room_for(contest.problem, failed.prepared).recomputation, gap=ANY)
        if contest.best is None:
            break
        least, cost = lower, contest.judged[contest.best].cost
    return least, cost


def _too_small(limit: int, smallest: int, cost: Cost) -> str:
    return (
        f"no plan fits in {format_bytes(limit)} on a device: the one that takes least has a peak of "
        f"{format_bytes(cost.peak_memory)} ({cost.memory}). Give memory_limit={smallest}, "
        "a larger mesh, a smaller batch, or mixed_precision. The largest values are made at"
    )
