"""No overlap pass makes a step slower by the simulator, nor takes more memory than it may: models, recipes, prices, caps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.fx import GraphModule

from autoshard.compile.compiled import split_program
from autoshard.config.options import Options
from autoshard.phases import OverlapPasses, default_passes, replaced
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes.base import Pass, PassContext
from passes.bucket_collectives import BucketCollectives
from passes.cost.build_program import program_of_graph
from passes.cost.scheduling.best_schedule import MORE_MEMORY, schedule
from passes.cost.simulate import Timeline, simulate
from passes.decompose_matmuls import DecomposeMatmuls
from passes.fuse_collectives import FuseCollectives
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.graph import copy_graph
from passes.ir.mesh import Mesh
from passes.manager import PassManager
from passes.schedule_overlap import ScheduleOverlap
from tests.extended import extended
from tests.models import Case, gpt, llama, moe

AXES = "dp=2,tp=2"
BUCKET = 1 << 16


def _hardware(links: str) -> Hardware:
    """Return a device of which the models fill a kernel, with links that take long, or take long to start."""
    h100 = hardware_named("h100")
    bandwidth, latency = {"slow": (1e7, 1e-6), "late": (1e9, 1e-4)}[links]
    link = replace(h100.inside, bandwidth=bandwidth, latency=latency, setup=0.0, reduces=0.0)
    rates = tuple((name, 1e10) for name, _ in h100.flops)
    return replace(h100, name=links, flops=rates, launch=1e-6, tile=1, units=1, inside=link, across=link)


def _halves(case: Case, recipe: str, mesh: Mesh, without: str | None = None) -> list[GraphModule]:
    options = Options(recipe=recipe, passes=replaced(default_passes(), without) if without else None)
    split = split_program(make_plan(PlanRequest(case.model.float(), case.args, case.kwargs, mesh, options)).graph, mode="eager")
    assert split.backward is not None
    return [split.forward, split.backward]


def _after(gm: GraphModule, mesh: Mesh, *passes: Pass) -> GraphModule:
    other = copy_graph(gm)
    PassManager(passes).run(other, PassContext(mesh))
    return other


def _as_it_stands(gm: GraphModule, mesh: Mesh) -> Timeline:
    return simulate(program_of_graph(gm, mesh))


def _ordered(gm: GraphModule, mesh: Mesh, limit: int) -> float:
    return schedule(program_of_graph(gm, mesh), memory_limit=limit).timeline.step_time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "recipe", "links"),
    [
        extended(lambda: llama(layers=1), "fsdp+megatron", "late"),
        (lambda: gpt(layers=1), "fsdp", "slow"),
        (moe, "zero2+megatron", "late"),
    ],
)
def test_no_pass_makes_a_step_slower(make: Callable[[], Case], recipe: str, links: str) -> None:
    mesh = Mesh(AXES).on(_hardware(links))
    for gm, unfused in zip(_halves(make(), recipe, mesh), _halves(make(), recipe, mesh, FuseCollectives.name), strict=True):
        given = _as_it_stands(gm, mesh)
        assert given.step_time <= _as_it_stands(unfused, mesh).step_time
        for room in (None, given.peak_memory):
            cap = int(MORE_MEMORY * given.peak_memory) if room is None else room
            before = _ordered(gm, mesh, cap)
            for one in (BucketCollectives(BUCKET, room), DecomposeMatmuls(room)):
                after = _after(gm, mesh, one)
                assert _ordered(after, mesh, cap) <= before
                assert _as_it_stands(after, mesh).peak_memory <= cap
            whole = OverlapPasses(room, bucket_bytes=BUCKET)
            for before_order in ((), (*whole.chunk, BucketCollectives(BUCKET, room))):
                unordered = _as_it_stands(_after(gm, mesh, *before_order), mesh)
                timeline = _as_it_stands(_after(gm, mesh, *before_order, ScheduleOverlap(room)), mesh)
                assert timeline.step_time <= given.step_time
                assert timeline.peak_memory <= (cap if room else int(MORE_MEMORY * unordered.peak_memory))
