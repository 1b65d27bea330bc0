"""The goal of a search: the memory limit, the gap to prove, and the time limit."""

from __future__ import annotations

from dataclasses import dataclass

from passes.search.model.memory_budget import MemoryBudget, RecomputationCurve

# Counted for each transition of a program that HiGHS solves. It takes as long where a program is easy, and eight times that for
# Llama 3 8B on 32 x 8 devices (`python -m benchmarks.highs_alone`).
SECONDS_OF_TRANSITION = 1e-4


@dataclass(frozen=True)
class Goal:
    """The goal of a search. Bytes per device; seconds. The first plan may take longer than the time limit.

    `keep_gathered` says whether gathered parameters stay for the backward; None: the search decides for each. Bytes
    over the limit can be recomputed at the cost of `recomputation`. Where all plans are proven to take `cutoff` seconds or more,
    the search ends without one, or with what it found so far. A large program is not solved where it cannot save as much time in
    so many `steps` as it takes, and no strategies join a program for less; by default, all are solved.
    """

    memory_limit: float | None = None
    gap: float = 0.005  # of the step: by how much a shorter plan may be possible
    time_limit: float | None = None
    keep_gathered: bool | None = None
    recomputation: RecomputationCurve = ()
    cutoff: float = float("inf")
    steps: float = float("inf")

    @property
    def budget(self) -> MemoryBudget | None:
        """Return the memory limit with what can be recomputed; None without a limit."""
        return None if self.memory_limit is None else MemoryBudget(self.memory_limit, self.recomputation)

    def is_worthwhile(self, seconds: float, transitions: int) -> bool:
        """Return whether to save so many seconds of a step is worth the time for a program of so many transitions."""
        return seconds * self.steps >= SECONDS_OF_TRANSITION * transitions
