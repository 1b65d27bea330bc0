"""Measure the communication that is exposed as lowered and after each pass: `python -m benchmarks.overlap`.

For each case, planned on meta and simulated: exposed communication and peak memory of a step with every collective awaited
at once, after each pass in turn, and in the scheduled order, which may take a twentieth more memory; a lower bound for any
order of whole messages; the ratio of the last two; and seconds of planning. With `--graph`, the seconds of each pass for
the graphs of all layers, and their predictions; `--layers 32 64` runs a case at each of these depths. Nothing runs on
devices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule

from autoshard import Mesh, Options
from autoshard.compile.compiled import split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.config.axis_recipes import recipes_of
from autoshard.phases import Phases, replaced
from autoshard.planner.chunking import layered
from autoshard.planner.evaluation import fold
from autoshard.planner.make_plan import make_plan
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.request import PlanRequest
from examples import gpt, llama
from passes.base import Observer, Pass, PassContext
from passes.bucket_collectives import BUCKET_BYTES
from passes.cost.build_program import program_of, program_of_graph
from passes.cost.program import COMPUTE, Program, Task
from passes.cost.scheduling.best_schedule import MORE_MEMORY, schedule
from passes.cost.scheduling.bucketing import bucket, sizes
from passes.cost.scheduling.exposed_bound import exposed_bound
from passes.cost.simulate import Timeline, simulate
from passes.cost.unroll import unroll
from passes.decompose_matmuls import DecomposeMatmuls
from passes.fuse_collectives import FuseCollectives
from passes.ir.graph import Stage, copy_graph
from passes.manager import PassManager


@dataclass(frozen=True)
class Case:
    """A model, its mesh and recipe, and the samples of its global batch."""

    config: llama.Config | gpt.Config
    mesh: str
    recipe: str | Mapping[str, str]
    batch: int
    hardware: str = "h100"


CASES = {
    "8b-fsdp": Case(llama.LLAMA3_8B, "dp=64", "fsdp", 64),
    "8b-fsdp-tp": Case(llama.LLAMA3_8B, "dp=32,tp=8", "fsdp+megatron", 64),
    "70b-fsdp-tp": Case(llama.LLAMA3_70B, "dp=32,tp=8", "fsdp+megatron", 32),
    "8b-hsdp": Case(llama.LLAMA3_8B, "replicate=100,shard=8", "hsdp", 800),
    "8b-tp": Case(llama.LLAMA3_8B, "tp=8", "megatron", 2),
    "gpt2-pcie": Case(gpt.GPT2, "dp=8", "fsdp", 64, "a100-pcie"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    parser.add_argument("--layers", type=int, nargs="+", default=[0])
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--symmetric-memory", action="store_true", help="what is cut may be one operator instead")
    given = parser.parse_args()
    for name, layers in product(given.cases or CASES, given.layers):
        case = CASES[name]
        case = replace(case, config=replace(case.config, layers=layers or case.config.layers))
        if given.graph:
            measure_graph(name, case)
        else:
            measure(name, case, given.bucket_bytes, DecomposeMatmuls(symmetric_memory=given.symmetric_memory))


def measure(name: str, case: Case, bucket_bytes: int, cutting: DecomposeMatmuls) -> None:
    """Print one case."""
    problem = captured_problem_of(case)
    lowered, cut = program_of_step(case, problem), program_of_step(case, problem, cutting)
    unfused = program_of_step(case, problem, without=FuseCollectives.name)
    limit = int(MORE_MEMORY * simulate(lowered).peak_memory)
    clock = time.process_time()
    best = schedule(cut, memory_limit=limit, buckets=sizes(bucket_bytes))
    seconds = time.process_time() - clock
    joined = bucket(cut, best.bucket_bytes) if best.bucket_bytes else cut
    print(f"{name}: {case.mesh} {case.hardware}, batch {case.batch}, {len(cut.tasks)} tasks")
    for what, timeline in (
        ("as lowered", simulate(awaited_at_once(unfused))),
        ("fuse_collectives", simulate(awaited_at_once(lowered))),
        ("decompose_matmuls", simulate(awaited_at_once(cut))),
        (f"buckets of {best.bucket_bytes >> 20} MiB", simulate(awaited_at_once(joined))),
        ("schedule_overlap", best.timeline),
    ):
        print(f"  {what:20} {_format(timeline)}")
    whole = bucket(lowered, best.bucket_bytes) if best.bucket_bytes else lowered
    exposed, bound = best.timeline.exposed, exposed_bound(whole)
    ratio = exposed / bound if bound else float("inf")
    excess = (exposed - bound) / best.timeline.step_time
    print(
        f"  {'no order below, whole':21} {'':17} exposed {bound * 1e3:8.2f} ms: ratio {ratio:.3f}, {excess:.2%} of the step above"
    )
    print(f"  seconds: {seconds:.2f} for sizes of buckets and orders", flush=True)


def measure_graph(name: str, case: Case) -> None:
    """Print the seconds and the effect of each pass on the graphs of one case, as they are compiled."""
    mesh, options, (model, args) = asked(case)
    split = split_program(make_plan(PlanRequest(model, args, {}, mesh, options)).graph, mode="eager")
    graphs = [gm for gm in (split.forward, split.backward) if gm is not None]
    overlap = OverlapPhase.of(options, mesh)
    assert overlap is not None
    clocks = Clocks(mesh)
    nodes, lines = sum(len(gm.graph.nodes) for gm in graphs), [_format(_as_it_stands(gm, mesh)) for gm in graphs]
    overlap.apply(split, mode="inductor", observers=(clocks,))
    for half, gm, line in zip(("forward", "backward"), graphs, lines, strict=False):
        print(f"{name}, {case.config.layers} layers, {half}\n  {'as lowered':20} {line}")
        for pass_, seconds, after in clocks.found[gm]:
            print(f"  {pass_:20} {after}, {seconds:5.2f} s of CPU")
    total = sum(seconds for found in clocks.found.values() for _, seconds, _ in found)
    each = f"{1e3 * total / nodes:.2f} ms a node"
    print(f"{name}, {case.config.layers} layers: {nodes} nodes, passes {total:.2f} s, {each}", flush=True)


@dataclass(frozen=True)
class Clocks(Observer):
    """Seconds of CPU of each pass and the prediction after it; until the order is found, collectives are awaited at once."""

    mesh: Mesh
    started: list[float] = field(default_factory=list)
    found: dict[GraphModule, list[tuple[str, float, str]]] = field(default_factory=dict)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        self.started.append(time.process_time())

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        seconds = time.process_time() - self.started.pop()
        is_ordered = pass_.gives is Stage.SCHEDULED
        timeline = simulate(program_of_graph(gm, self.mesh)) if is_ordered else _as_it_stands(gm, self.mesh)
        self.found.setdefault(gm, []).append((pass_.name, seconds, _format(timeline)))


def _as_it_stands(gm: GraphModule, mesh: Mesh) -> Timeline:
    return simulate(awaited_at_once(program_of_graph(gm, mesh)))


def _format(timeline: Timeline) -> str:
    return (
        f"step {timeline.step_time * 1e3:8.1f} ms, exposed {timeline.exposed * 1e3:8.2f} of "
        f"{timeline.communication * 1e3:8.2f} ms, peak {timeline.peak_memory / 1e9:6.2f} GB"
    )


def captured_problem_of(case: Case) -> Problem:
    mesh, options, (model, args) = asked(case)
    return captured_problem(PlanRequest(model, args, {}, mesh, options))


def program_of_step(case: Case, problem: Problem, *on_halves: Pass, without: str | None = None) -> Program:
    """Return the step of the whole model, not bucketed and not reordered. `on_halves` run on forward and backward, after the
    usual passes; `without` names one to leave out."""
    folded, mesh = fold(problem), problem.mesh
    gm, ctx = copy_graph(folded.graph), PassContext(mesh)
    phases = Phases(problem.seed(gm, recipes_of(case.recipe, mesh)), problem.cast)
    usual = (*phases.place, *phases.lower, *phases.rematerialize)
    PassManager(replaced(usual, without) if without else usual).run(gm, ctx)
    split = split_program(gm, mode="eager")
    assert split.backward is not None
    forward, backward = (layered(half, split.forward, folded.repeats) for half in (split.forward, split.backward))
    for half in (forward, backward):
        PassManager(on_halves).run(half, ctx)
    facts = {"outputs": split.outputs, "gradients": split.gradients}
    return unroll(program_of(forward, backward, mesh, **facts), folded.repeats)


def asked(case: Case) -> tuple[Mesh, Options, tuple[nn.Module, tuple[Any, ...]]]:
    """Return mesh, options, and the model with its arguments, on meta, of a case."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = case.config
    with torch.device("meta"):
        tokens = torch.zeros(case.batch, config.seq, dtype=torch.long)
        model = gpt.GPT(config) if isinstance(config, gpt.Config) else llama.Llama(config)
    return (
        Mesh(case.mesh, hardware=case.hardware),
        Options(recipe=case.recipe, mixed_precision=policy),
        (model, (tokens, tokens)),
    )


def awaited_at_once(program: Program) -> Program:
    """Return `program` with a wait after every collective, as a graph has it before it is scheduled."""
    tasks: list[Task] = []
    for task in program.tasks:
        tasks.append(task)
        if task.is_collective:
            tasks.append(Task(f"wait {task.name}", "compute", COMPUTE, 0.0, task.outputs, backward=task.backward))
    return replace(program, tasks=tuple(tasks))


if __name__ == "__main__":
    main()
