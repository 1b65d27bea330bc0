"""Rank candidates: the search that they belong to, and the best of those evaluated so far."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from autoshard.planner.effort import Effort
from autoshard.planner.evaluation import Evaluation, Folded, evaluate
from autoshard.planner.prediction import memory_of
from autoshard.planner.problem import Problem, Recipes
from autoshard.planner.ties import TIE, preferred
from autoshard.plans.outcome import Candidate
from passes.cost.simulate import Timeline
from passes.errors import RecipeError, UserError
from passes.search.solution import Solution

SOLVED = "solved"

_log = logging.getLogger("autoshard.planner")


@dataclass(frozen=True, eq=False)
class SearchTask:
    """A problem, the graph that its candidates are evaluated on, and how much to try; the best of other problems' plans takes
    `best_elsewhere` seconds, which is `underpriced_elsewhere` times what the solver says.
    """

    problem: Problem
    folded: Folded
    effort: Effort
    best_elsewhere: float = float("inf")
    underpriced_elsewhere: float = 1.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def limit(self) -> int:
        """Return the memory limit of one device in bytes."""
        return self.problem.options.memory_bytes(memory_of(self.problem.mesh))

    @property
    def left(self) -> float:
        """Return the remaining seconds of the time limit."""
        limit = self.problem.options.time_limit
        return float("inf") if limit is None else limit - (time.perf_counter() - self.started)

    @property
    def late(self) -> str:
        """Return why a candidate is left out that there was no time for."""
        return f"the time limit of {self.problem.options.time_limit} s was over"

    @property
    def no_recipes(self) -> Recipes:
        """Return the recipes of the solver's plans: none, on every axis."""
        return (None,) * self.problem.mesh.ndim

    def evaluate(
        self, recipes: Recipes, solution: Solution | None = None, *, worst: float = float("inf")
    ) -> Evaluation:
        """Simulate a candidate; one slower than `worst` seconds is not made to fit."""
        return evaluate(self.problem, self.folded, recipes, solution, worst=worst, effort=self.effort)

    def fits(self, evaluation: Evaluation) -> bool:
        """Return whether the peak fits in a device's memory."""
        return evaluation.cost.peak_memory <= self.limit

    def rank(self, evaluation: Evaluation) -> tuple[float, float]:
        """Return a sort key: candidates that fit, by time, before the others, by memory."""
        cost = evaluation.cost
        return (0.0, cost.step_time) if self.fits(evaluation) else (float(cost.peak_memory), 0.0)


@dataclass
class Standings:
    """Candidates by name, in the order in which they were evaluated, updated as the search goes on."""

    task: SearchTask
    evaluated: dict[str, Evaluation] = field(default_factory=dict)
    declined: list[Candidate] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    smallest: Evaluation | None = None  # the simulated plan with the lowest peak

    def see(self, evaluation: Evaluation) -> None:
        """Record a simulated plan, whether it becomes a candidate or not."""
        if self.smallest is None or evaluation.cost.peak_memory < self.smallest.cost.peak_memory:
            self.smallest = evaluation

    def enter(self, name: str, evaluation: Evaluation) -> None:
        """Enter a candidate, replacing one of the same name."""
        self.see(evaluation)
        self.evaluated[name] = evaluation

    def decline(self, name: str, note: str) -> None:
        """Leave a candidate out, and say why."""
        self.declined.append(Candidate(name, None, fits=False, note=note))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Leave the candidate out, with a warning, if a bug in autoshard makes it fail; the search goes on with the
        others.

        A recipe that does not suit the model is declined. Any other UserError is passed on, since the user can fix its cause.
        """
        try:
            yield
        except RecipeError as error:
            self.decline(name, str(error))
        except UserError:
            raise
        except Exception as error:  # only this candidate fails: a plan without it is better than none
            self.failures.append(error)
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _log.warning("candidate %s failed", name, exc_info=error)
            self.decline(name, f"failed: {what}")
            warnings.warn(
                f"the candidate plan {name!r} is left out, as making it failed ({what}); please report this with the model and "
                "the log of autoshard.planner",
                stacklevel=2,
            )

    def decline_late(self, name: str) -> None:
        """Leave out a candidate because the time limit is over."""
        self.decline(name, self.task.late)

    @property
    def best(self) -> str | None:
        """Return the name of the best candidate that fits: of those as fast as the fastest, by `preferred`."""
        fitting = self._fitting
        return preferred(fitting, [name for name in fitting if name != SOLVED])

    @property
    def best_time(self) -> float:
        """Return the seconds of a step of the fastest candidate that fits."""
        return min((timeline.step_time for timeline in self._fitting.values()), default=float("inf"))

    @property
    def worst_time(self) -> float:
        """Return the seconds of a step that a candidate must not exceed to be the best."""
        return min(self.best_time, self.task.best_elsewhere) * (1 + TIE)

    @property
    def _fitting(self) -> dict[str, Timeline]:
        return {name: one.timeline for name, one in self.evaluated.items() if self.task.fits(one)}
