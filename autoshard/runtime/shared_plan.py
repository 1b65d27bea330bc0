"""Share one plan among all ranks of a mesh: the first rank reads or makes it, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.runtime.agreement import of_first, together
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.process_groups import MeshGroups
from passes.errors import DistributedError, PlanError

Decided = Callable[[], ShardingPlan]  # waits for the first rank's plan


def given_plan(groups: MeshGroups, plan: ShardingPlan | str | PathLike[str]) -> ShardingPlan:
    """Return the first rank's plan on every rank; only that rank reads a file.

    If it cannot be read, raises PlanError there, and DistributedError elsewhere.
    """

    if not isinstance(plan, ShardingPlan | str | PathLike):
        raise PlanError(f"plan={plan!r}: give a ShardingPlan, or the path of a file that one was saved to")

    def text() -> str | None:
        if not _leads(groups):
            return None
        return (plan if isinstance(plan, ShardingPlan) else ShardingPlan.load(plan)).to_json()

    sent = of_first(groups, together(groups, "reading the plan", text))
    assert sent is not None
    return plan if isinstance(plan, ShardingPlan) and _leads(groups) else ShardingPlan.from_json(sent)


def plan_together(groups: MeshGroups, attempt: Callable[[Decided | None], LocalProgram]) -> LocalProgram:
    """Plan on the first rank with `attempt(None)`; on the others, `attempt(decided)` makes the program of its plan.

    `decided()` waits for the plan, so that a rank can capture its model meanwhile. Raises what `attempt` raises here,
    and DistributedError if it failed on another rank, or if this rank has another model or other arguments than the
    first.
    """
    run = _lead if _leads(groups) else _follow
    return together(groups, "planning", lambda: run(groups, attempt))


def _leads(groups: MeshGroups) -> bool:
    return groups.rank == groups.mesh.ranks[0]


@dataclass(frozen=True)
class _Decision:
    """Result of the first rank's attempt, as it is sent to the others."""

    plan: str  # JSON; empty if it failed
    failure: str = ""


def _lead(groups: MeshGroups, attempt: Callable[[Decided | None], LocalProgram]) -> LocalProgram:
    decision = _Decision("", "it was stopped")
    try:
        local = attempt(None)
        decision = _Decision(local.plan.to_json() if groups.mesh.size > 1 else "")
        return local
    except Exception as error:
        decision = _Decision("", f"{type(error).__name__}: {error}")
        raise
    finally:
        of_first(groups, decision)


def _follow(groups: MeshGroups, attempt: Callable[[Decided | None], LocalProgram]) -> LocalProgram:
    received: list[_Decision] = []
    first = groups.mesh.ranks[0]

    def decided() -> ShardingPlan:
        received.append(of_first(groups, _Decision("")))
        if not received[0].plan:
            raise DistributedError(f"planning failed on rank {first}: {received[0].failure}")
        return ShardingPlan.from_json(received[0].plan)

    try:
        return attempt(decided)
    except PlanError as error:
        raise DistributedError(
            f"rank {groups.rank} and rank {first} have different models or inputs: {error.differences or error}; build "
            "the same model, with the same options and example inputs, on each"
        ) from error
    finally:
        if not received:
            of_first(groups, _Decision(""))  # the first rank sends it to all, whether used or not
