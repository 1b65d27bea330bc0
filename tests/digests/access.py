"""All that digests read of the library beyond its public API: adapt this file alone when the code is renamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan
from autoshard.compile.compiled import Split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.debug.simulated_ranks import Call, Ranks
from autoshard.inspection.report.table import format_plan
from autoshard.planner.make_plan import Planned, make_plan
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import PlanRecord
from passes.ir.text import format_graph


@dataclass(frozen=True)
class Program:
    """A program as it is compiled, and what it was made of."""

    planned: Planned
    forward: str
    backward: str
    ends: str  # what is given and returned, in order
    remarks: tuple[str, ...]  # of those that cut, join and order messages

    @property
    def plan(self) -> PlanRecord:
        return self.planned.plan


@dataclass(frozen=True)
class Around:
    """The decisions that a program is planned around, as at run time."""

    batch_axes: tuple[int, ...] | None = None  # that the caller splits the batch over; None: free to choose
    follows: ShardingPlan | None = None
    stored_as: ShardingPlan | None = None  # of an earlier program, whose parameters' layouts stay


def make_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    around: Around,
    *,
    training: bool,
) -> Program:
    """Plan the whole model, then partition and order its program, as `autoshard()` does before it compiles."""
    stored = None if around.stored_as is None else {n: v.layout for n, v in around.stored_as.parameters.items()}
    axes = around.batch_axes
    request = PlanRequest(model, args, kwargs, mesh, options, training=training, stored=stored, batch_axes=axes)
    planned = make_plan(request, plan=around.follows)
    split = split_program(planned.graph, mode=options.compile)
    overlap = OverlapPhase.of(options, planned.plan.mesh)
    remarks = () if overlap is None else overlap.apply(split, mode=options.compile)
    mesh = planned.plan.mesh
    backward = "" if split.backward is None else format_graph(split.backward, mesh)
    return Program(planned, format_graph(split.forward, mesh), backward, _ends(split), tuple(map(str, remarks)))


def _ends(split: Split) -> str:
    sides = (split.inputs, split.outputs, split.tangents, split.gradients)
    return "\n".join(f"{one.role.value} {one.name}" for side in sides for one in side)


def run_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], program: Program
) -> dict[str, Tensor]:
    """Return outputs, gradients and buffers of one step on simulated ranks, whole, by kind and name."""
    with torch.no_grad():
        step = Ranks.of(Call(model, args, kwargs), program.planned).run().step
    kinds = {"output": step.outputs, "gradient": step.gradients, "buffer": step.buffers}
    return {f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()}


def layout_text(layout: Any) -> str:
    """Return the placements of a layout, one per axis of the mesh."""
    return ", ".join(map(str, layout.placements))


def table_text(plan: ShardingPlan) -> str:
    """Return what a plan prints as, on lines so long that none is broken."""
    return format_plan(plan, width=1000, colour=False)
