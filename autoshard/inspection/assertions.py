"""Assert properties of a plan in a test: counts of collectives, exposed time, memory, fallbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from types import NoneType

from autoshard.config.validation import check_count, check_kind
from autoshard.inspection.explanation import folded_collectives
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.plans.collectives import Collective
from autoshard.plans.record import PlanRecord
from passes.errors import UserError
from passes.ir.units import format_bytes

GB = 1e9
SHOWN = 6  # lines of collectives that a message lists; equal ones share a line


def assert_plan(
    plan: PlanRecord,
    *,
    all_gathers: int | None = None,
    reduce_scatters: int | None = None,
    all_reduces: int | None = None,
    all_to_alls: int | None = None,
    axis: str | None = None,
    step_ms: float | None = None,
    exposed_ms: float | None = None,
    peak_gb: float | None = None,
    fallbacks: int | None = None,
    golden: str | PathLike[str] | None = None,
) -> None:
    """Raise AssertionError if `plan` is not as expected, with the actual value and the collectives.

    Counts are exact, for one step: a collective that runs again in the backward counts twice; `axis` limits them to
    collectives over it. `step_ms`, `exposed_ms` (predicted) and `peak_gb` (1e9 bytes on a device) are upper limits, as
    is `fallbacks`: the number of ops that run on whole tensors because no rule shards them. `golden` is a saved plan
    that this one has to equal. Raises UserError for an argument of another type and for a limit on something that was
    not predicted, and PlanError for a golden plan that cannot be read.
    """
    counts = {"all_gathers": all_gathers, "reduce_scatters": reduce_scatters, "all_reduces": all_reduces}
    counts["all_to_alls"] = all_to_alls
    limits = {"step_ms": step_ms, "exposed_ms": exposed_ms, "peak_gb": peak_gb}
    _check(plan, counts | {"fallbacks": fallbacks}, limits, golden)
    if axis is not None:
        plan.mesh.index(axis)
    found = [
        *(line for name, count in counts.items() if count is not None for line in _counted(plan, name, count, axis)),
        *(line for name, limit in limits.items() if limit is not None for line in _limited(plan, name, limit)),
        *(_fallen_back(plan, fallbacks) if fallbacks is not None else ()),
        *(_changed(plan, golden) if golden is not None else ()),
    ]
    if found:
        raise AssertionError("the plan is not as expected:\n" + "\n".join(found))


def _check(plan: object, counts: Mapping[str, object], limits: Mapping[str, object], golden: object) -> None:
    """Raise UserError for an argument of `assert_plan` of another type."""
    where = "assert_plan"
    check_kind(where, "plan", plan, PlanRecord, "a plan; ShardingPlan.load(path) reads a saved one")
    for name, count in counts.items():
        if count is not None:
            check_count(where, name, count, "how many there are")
    for name, limit in limits.items():
        check_kind(where, name, limit, (int, float, NoneType), "a number")
    check_kind(where, "golden", golden, (str, PathLike, NoneType), "the path that a plan was saved to")


def _counted(plan: PlanRecord, name: str, expected: int, axis: str | None) -> Iterator[str]:
    chosen = [one for one in plan.collectives if one.kind == name.removesuffix("s") and (axis is None or axis in one.axes)]
    count = len(chosen) + sum(one.recomputed for one in chosen)
    if count != expected:
        yield f"{name}={expected}: there are {count}{f' over {axis}' if axis else ''}"
        yield from _listed(chosen)


def _limited(plan: PlanRecord, name: str, limit: float) -> Iterator[str]:
    if plan.cost is None:
        raise UserError(f"assert_plan({name}={limit}): nothing was predicted for this plan; make it with autoshard.plan(...)")
    cost = plan.cost
    value = {"step_ms": cost.step_time * 1e3, "exposed_ms": cost.exposed_comm * 1e3, "peak_gb": cost.peak_memory / GB}[name]
    if value <= limit:
        return
    yield f"{name}={limit:g}: it is {value:.4g}"
    if name == "peak_gb":
        sizes = {kind: size for kind, size in vars(cost.memory).items() if size}
        yield "  " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(sizes.items(), key=lambda x: -x[1]))
    else:
        yield from _listed(sorted(plan.collectives, key=lambda one: -(one.exposed or 0.0)))


def _fallen_back(plan: PlanRecord, limit: int) -> Iterator[str]:
    remarks = [remark for remark in plan.remarks if "runs replicated" in remark.text]
    nodes = dict.fromkeys(remark.node for remark in remarks)
    if len(nodes) > limit:
        yield f"fallbacks={limit}: {len(nodes)} ops run on whole tensors"
        yield from (f"  {remark}" for remark in remarks[:SHOWN])


def _changed(plan: PlanRecord, golden: str | PathLike[str]) -> Iterator[str]:
    if change := ShardingPlan.load(golden).diff(plan):
        yield f"golden={str(golden)!r}: it changed; to accept that, plan.save({str(golden)!r})"
        yield from (f"  {line}" for line in str(change).splitlines())


def _listed(collectives: Sequence[Collective]) -> Iterator[str]:
    lines = list(folded_collectives(collectives))
    yield from lines[: 2 * SHOWN]
    if len(lines) > 2 * SHOWN:
        yield f"  and {len(lines) // 2 - SHOWN} more"
