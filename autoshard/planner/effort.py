"""How much a search tries: `QUICK` for a what-if, `FULL` for a plan that runs, `EXHAUSTIVE` for a table of all recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from passes.cost.scheduling.best_schedule import WINDOWS
from passes.search.goal import Goal


@dataclass(frozen=True)
class Effort:
    """The numbers that a search stops at. Gaps and shares are parts of a step's time."""

    gap: float  # how far from proven the solver's plan may be
    grouped_gap: float  # the same where it uses several axes alike
    takes_first: bool  # the solver's first good plan is not improved, and the first program that fits memory is taken
    recipes: Literal["needed", "promising", "all"]  # which are simulated: until a plan is good; those the solver finds near it
    windows: tuple[int, ...]  # of what may be gathered ahead, in largest gathers: an order is tried for each
    bucket_sizes: int  # how many sizes of messages are tried, the largest first
    least_chunked: float  # that sending in chunks must be able to hide, or it is not simulated
    alternatives: int  # of one explained value, that a program is solved for; the others get a plan near the bound


# Gaps: proving 0.5 % of 8B on 64 ranks takes seconds, 2 % and 10 % a fraction of one (benchmarks.planning_time).
# Chunks: of 46.9 ms, those over 1 % left 28.6 ms (benchmarks.overlap 8b-tp --graph).
FULL = Effort(
    gap=Goal.gap,
    grouped_gap=0.02,
    takes_first=False,
    recipes="promising",
    windows=WINDOWS,
    bucket_sizes=2,
    least_chunked=0.01,
    alternatives=3,
)
EXHAUSTIVE = replace(FULL, recipes="all")
QUICK = Effort(
    gap=0.1,
    grouped_gap=0.1,
    takes_first=True,
    recipes="needed",
    windows=(2,),
    bucket_sizes=1,
    least_chunked=0.05,
    alternatives=1,
)
