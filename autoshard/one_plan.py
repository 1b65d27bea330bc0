"""One plan for all ranks of a mesh: the first rank reads or makes it, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

from autoshard.execution import LocalProgram
from autoshard.groups import MeshGroups
from autoshard.guards import of_first, together
from autoshard.plan import ShardingPlan
from passes.errors import DistributedError, PlanError


def given_plan(groups: MeshGroups, plan: ShardingPlan | str | PathLike[str]) -> ShardingPlan:
    """The plan that the first rank was given, on every rank; a file is read there alone.

    Raises PlanError there, and DistributedError elsewhere, where it cannot be read.
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


def plan_together(groups: MeshGroups, attempt: Callable[[ShardingPlan | None], LocalProgram]) -> LocalProgram:
    """`attempt(None)` decides on the first rank; on the others, `attempt(plan)` makes the program of that plan.

    Raises what `attempt` raises here, and DistributedError where it failed on another rank, or where this rank has
    another model or other arguments than the first.
    """
    run = _lead if _leads(groups) else _follow
    local = together(groups, "planning", lambda: run(groups, attempt))
    assert local is not None, "the first rank failed, and together did not say so"
    return local


def _leads(groups: MeshGroups) -> bool:
    return groups.rank == groups.mesh.ranks[0]


def _lead(groups: MeshGroups, attempt: Callable[[ShardingPlan | None], LocalProgram]) -> LocalProgram:
    text = None
    try:
        local = attempt(None)
        if groups.mesh.size > 1:
            text = local.plan.to_json()
        return local
    finally:
        of_first(groups, text)  # None: it failed, as `together` will say


def _follow(groups: MeshGroups, attempt: Callable[[ShardingPlan | None], LocalProgram]) -> LocalProgram | None:
    text = of_first(groups, None)
    if text is None:
        return None
    try:
        return attempt(ShardingPlan.from_json(text))
    except PlanError as error:
        raise DistributedError(
            f"rank {groups.rank} and rank {groups.mesh.ranks[0]} have different models or inputs: {error.differences or error}; "
            "build the same model, with the same options and example inputs, on each"
        ) from error
