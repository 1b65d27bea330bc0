"""Set how much a search tries: `QUICK` for a what-if, `FULL` for a plan that runs, `EXHAUSTIVE` for a table of all
recipes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from passes.cost.scheduling.best_schedule import WINDOWS
from passes.search.goal import Goal

STEPS = 100_000  # of a training, in which a shorter step has to save the time that it takes to find it


@dataclass(frozen=True)
class Effort:
    """Limits at which a search stops. Gaps and shares are parts of a step's time."""

    gap: float  # largest optimality gap of the solver's plan
    grouped_gap: float  # the same if it uses several axes alike
    takes_first: bool  # stop at the solver's first good plan, and at the first program that fits in memory
    recipes: Literal["needed", "possible", "all"]  # those that can be better, but none if the solver's plan is good; those; all
    windows: tuple[int, ...]  # limits on what is gathered ahead, in largest gathers: one order is tried for each
    bucket_sizes: int  # how many bucket sizes are tried, the largest first
    least_chunked: float  # part of a step that chunks must be able to hide, or they are not simulated
    alternatives: int  # alternatives of an explained value that are solved; the others get a plan near the bound


# Gaps: GPT-2 on 8 ranks takes 1.3 s of search to 0.5 %, 0.4 s to 2 % or 10 %; Llama 3 8B on 64 ranks 0.8 s to any of them,
# as its first plan is proven to 0.03 % (benchmarks.search_constants). A grouped plan is simulated, so 2 % is close enough.
# Chunks that save over 1 % shorten a step from 46.9 to 28.6 ms (benchmarks.overlap 8b-tp --graph).
FULL = Effort(
    gap=Goal.gap,
    grouped_gap=0.02,
    takes_first=False,
    recipes="possible",
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
