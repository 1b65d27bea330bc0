"""Find the first pass after which the program's numbers differ from those on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from autoshard.config.options import Options
from autoshard.config.topology import mesh_of
from autoshard.debug.checking import (
    TOLERANCE,
    Check,
    Difference,
    Keeper,
    check_values,
    comparison,
    differences,
    drawn_by,
    precision_of,
    with_buffers,
)
from autoshard.debug.overlapped_run import run_after_each_pass
from autoshard.debug.random_draws import Draws, ReplayError
from autoshard.debug.rounding import Rounding
from autoshard.debug.simulated_ranks import Call, Ranks, Results, run_on_one_device, run_whole
from autoshard.debug.unwritten_memory import filled
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes.base import Observer, Pass, PassContext
from passes.errors import UserError
from passes.ir.graph import Stage, copy_graph
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Step:
    """The results after a pass that differ from the model's."""

    pass_name: str  # "capture": the graph before the first pass
    differs: tuple[Difference, ...]


@dataclass(frozen=True)
class Bisection:
    """Result of `bisect`; true if the numbers are right after every pass.

    If they are wrong after a pass that makes the per-device program, `check` names the first value that differs: its
    sharding rule or collective is wrong, rather than that pass.
    """

    mesh: Mesh
    steps: tuple[Step, ...]
    check: Check | None

    def __bool__(self) -> bool:
        return self.first is None

    @property
    def first(self) -> Step | None:
        return next((step for step in self.steps if step.differs), None)

    def __str__(self) -> str:
        if self.first is None:
            return f"the numbers are right after each of {', '.join(step.pass_name for step in self.steps)}"
        right = [step.pass_name for step in self.steps[: self.steps.index(self.first)]]
        lines = [f"right after {', '.join(right) or 'nothing'}; wrong after {self.first.pass_name}:"]
        lines += [f"  {one.value} is off by {one.error:.1e}" for one in self.first.differs[:5]]
        if self.check is not None and self.check.first is not None:
            lines += [f"the first value that differs: {self.check.first}"]
        return "\n".join(lines)


def bisect(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
) -> Bisection:
    """Run the program after every pass, and compare its results with the model's.

    Until collectives are lowered, a program computes whole tensors and runs as such; after that it runs on simulated
    ranks. The last passes run on its forward and its backward. Differences no larger than those that rounding alone
    causes (`autoshard/debug/rounding.py`) are ignored.
    The model gets the random numbers that the ranks draw.
    Raises InputError for a model on meta; UserError for one whose results cannot be compared: with mixed precision, or
    if it draws random numbers differently from the program.
    """
    call, options = Call(model, args, kwargs or {}), options or Options()
    check_values(call)
    if options.mixed_precision is not None:
        raise UserError("with mixed precision the numbers are not the model's after any pass; bisect without")
    keeper, whole = _Every(), Keeper()
    wanted, training = mesh_of(mesh, options.hardware), torch.is_grad_enabled()
    request = PlanRequest(model, args, call.kwargs, wanted, options, training=training)
    planned = make_plan(request, observers=(keeper, whole))
    explicit, call = whole.graph, call.returning(planned.captured)
    precision, ranks = precision_of(explicit), Ranks.of(call, planned)
    steps = []
    with filled():
        drawn = drawn_by(ranks, explicit)
        try:
            expected = run_on_one_device(call, training=training, inside=drawn.replayed())
        except ReplayError as error:
            raise UserError(
                f"the model's random numbers cannot be made those of a mesh: {error}; bisect model.eval()"
            ) from error
        rounding = Rounding(call, precision, training, drawn=drawn)
        for name, got in _results(keeper, ranks, drawn, options):
            found = differences(with_buffers(got.step, call), expected, TOLERANCE[precision], rounding, got.apart)
            steps.append(Step(name, tuple(one for one in found if not one.is_rounding)))
    compared = comparison(explicit, planned, call, options) if any(step.differs for step in steps) else None
    if compared and not compared.not_compared:  # value by value, nothing differs: rounding decided a comparison of numbers
        steps, compared = [Step(step.pass_name, ()) for step in steps], None
    return Bisection(planned.plan.mesh, tuple(steps), compared)


def _results(keeper: _Every, ranks: Ranks, drawn: Draws, options: Options) -> Iterator[tuple[str, Results]]:
    """Return the results of the program after each pass that changed it."""
    for name, stage, gm in keeper.kept:
        if stage >= Stage.LOCAL:
            yield name, replace(ranks, planned=replace(ranks.planned, graph=gm)).run(same_copies=False)
        else:
            yield name, Results(run_whole(gm, ranks, drawn.in_graph(gm)), (), {})
    yield from run_after_each_pass(ranks, options)


@dataclass
class _Every(Observer):
    """Observer that copies the graph before the first pass and after every pass that changed it."""

    kept: list[tuple[str, Stage, GraphModule]] = field(default_factory=list)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        if not self.kept:
            self.kept.append(("capture", pass_.takes, copy_graph(gm)))

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if changed:
            self.kept.append((pass_.name, pass_.gives, copy_graph(gm)))
