"""Which plan is best: the solved placement, or an expert's recipe, judged by the simulator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoshard.constraints import recipes_of
from autoshard.judge import Folded, Judged, judge, seeded
from autoshard.prediction import memory_of
from autoshard.problem import Problem, Recipes
from autoshard.progress import Progress
from autoshard.report.cost import format_memory
from passes.base import PassContext
from passes.errors import InputError, MemoryLimitError, RecipeError
from passes.insert_reshards import InsertReshards
from passes.ir.mesh import Mesh
from passes.ir.plan import Candidate, Cost, Search
from passes.ir.units import format_bytes, format_seconds
from passes.manager import PassManager
from passes.merge_reductions import MergeReductions
from passes.propagate import Propagate
from passes.search.find import Goal, Searched, find
from passes.search.solution import Solution

EXPERTS = ("fsdp", "zero2", "ddp", "hsdp", "megatron", "fsdp+megatron", "zero2+megatron", "ddp+megatron", "hsdp+megatron")
SOLVED = "solved"
TRIES = 4  # how often the solver is asked for less memory, where the simulator finds a higher peak than it estimated
NEAR = 1.0  # part of a step that the solver's model may be off by: a recipe that it finds slower by more is not simulated


@dataclass(frozen=True)
class Choice:
    """The best candidate and how it was found."""

    judged: Judged
    solution: Solution | None  # None: a recipe's
    search: Search
    searched: Searched | None  # None: nothing fitted


def search(problem: Problem, folded: Folded, progress: Progress, *, every: bool = False) -> Choice:
    """The candidate with the shortest simulated step of those that fit in memory; of equal ones the first.

    Recipes that the solver's own model finds hopeless are not simulated, unless `every` is.
    Raises MemoryLimitError where nothing fits: with what takes the memory, and the smallest limit that would do.
    """
    started = time.perf_counter()
    contest = _Contest(problem, folded, problem.options.memory_bytes(memory_of(problem.mesh)))
    progress(SOLVED)
    searched = contest.solve()
    estimates = {}
    for name, recipes in _experts(problem.mesh):
        try:
            problem.check_batch(recipes)
        except InputError as error:
            contest.declined.append(Candidate(name, None, fits=False, note=str(error)))
            continue
        estimates[name] = contest.estimate(recipes, searched), recipes
    for name, (estimate, recipes) in sorted(estimates.items(), key=lambda item: item[1][0]):
        if not every and contest.best is not None and estimate > contest.best_time * (1 + NEAR):
            note = f"about {format_seconds(estimate)} by the solver's model: not simulated"
            contest.declined.append(Candidate(name, None, fits=False, note=note))
            continue
        progress(name)
        contest.enter(name, judge(problem, folded, recipes))
    return contest.choice(time.perf_counter() - started, searched)


@dataclass
class _Contest:
    """Candidates as they are judged."""

    problem: Problem
    folded: Folded
    limit: int
    judged: dict[str, Judged] = field(default_factory=dict)
    declined: list[Candidate] = field(default_factory=list)
    solution: Solution | None = None
    best: str | None = None  # of those that fit

    @property
    def best_time(self) -> float:
        return self.judged[self.best].cost.step_time if self.best is not None else float("inf")

    def enter(self, name: str, judged: Judged) -> None:
        self.judged[name] = judged
        if judged.cost.peak_memory <= self.limit and judged.cost.step_time < self.best_time:
            self.best = name

    def solve(self) -> Searched | None:
        """The solved placement, asked for again with less memory while the simulator finds that it does not fit."""
        unpinned: Recipes = (None,) * self.problem.mesh.ndim
        gm = seeded(self.problem, self.folded, unpinned)
        searched, asked = None, self.limit
        for _ in range(TRIES):
            goal = Goal(memory_limit=asked, time_limit=self.problem.options.time_limit)
            try:
                searched = find(gm, self.problem.mesh, goal)
            except MemoryLimitError:
                break
            self.solution = searched.solution
            judged = judge(self.problem, self.folded, unpinned, self.solution)
            self.enter(SOLVED, judged)
            excess = judged.cost.peak_memory - self.limit
            if excess <= 0:
                break
            asked -= excess
        return searched

    def estimate(self, recipes: Recipes, searched: Searched | None) -> float:
        """Seconds of a step by the solver's model; 0 where it cannot tell."""
        if searched is None:
            return 0.0
        gm = seeded(self.problem, self.folded, recipes)
        passes = (Propagate(), InsertReshards(), MergeReductions())
        PassManager(passes).run(gm, PassContext(self.problem.mesh))
        return searched.price(gm) or 0.0

    def choice(self, seconds: float, searched: Searched | None) -> Choice:
        if self.best is None:
            raise MemoryLimitError(_too_small(self.limit, [judged.cost for judged in self.judged.values()]))
        entered = [(name, judged.cost) for name, judged in self.judged.items()]
        candidates = [Candidate(name, cost, fits=cost.peak_memory <= self.limit) for name, cost in entered]
        return Choice(
            self.judged[self.best],
            self.solution if self.best == SOLVED else None,
            Search(
                self.best,
                (*candidates, *self.declined),
                self.limit,
                self.solution.objective if self.solution is not None else None,
                self.solution.bound if self.solution is not None else None,
                seconds,
            ),
            searched,
        )


def _experts(mesh: Mesh) -> Iterator[tuple[str, Recipes]]:
    """The recipes that go with `mesh`, by name."""
    seen: set[Recipes] = set()
    for name in EXPERTS:
        try:
            recipes = recipes_of(name, mesh)
        except RecipeError:
            continue
        if recipes not in seen:
            seen.add(recipes)
            yield name, recipes


def _too_small(limit: int, costs: list[Cost]) -> str:
    least = min(costs, key=lambda cost: cost.peak_memory)
    return (
        f"no plan fits in {format_bytes(limit)} on a device: the one that takes least has a peak of "
        f"{format_bytes(least.peak_memory)} ({format_memory(least.memory)}). Give memory_limit={least.peak_memory}, "
        "a larger mesh, a smaller batch, or mixed_precision"
    )
