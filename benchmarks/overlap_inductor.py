"""Our passes against Inductor's own, on the same graphs: `python -m benchmarks.overlap_inductor`.

Each case of `benchmarks.overlap`, by default with four layers: its lowered forward and backward graphs are given to
`schedule_overlap_bucketing` of Inductor, with and without buckets, and to our passes. The results are simulated
with collective times by our model, and again by Inductor's model of NCCL; both schedulers are given the times that they are
evaluated by. Inductor may take a twentieth or a gigabyte more memory than the lowered graph by its own count,
which is its default. Ours may take what Inductor's faster variant took by the simulator's count, and in a second run the
device's memory. Nothing runs on devices.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import comm_analysis
from torch._inductor.fx_passes import bucketing, overlap_scheduling
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard import Options, Overlap
from autoshard.compile.compiled import Split, split_program
from autoshard.phases import OverlapPasses
from autoshard.planner.make_plan import make_plan
from autoshard.planner.prediction import memory_of
from autoshard.planner.request import PlanRequest
from autoshard.runtime.process_groups import axes_used
from benchmarks.overlap import CASES, Case, asked, awaited_at_once
from passes._torch import register_group, unregister_group
from passes.base import PassContext
from passes.cost.build_program import program_of_graph
from passes.cost.collective_time import collective_seconds
from passes.cost.program import Program, Task
from passes.cost.scheduling.best_schedule import memory_cap, schedule
from passes.cost.scheduling.bucketing import bucket, seconds_by_sort, sizes
from passes.cost.simulate import Timeline, simulate
from passes.ir.graph import copy_graph, results_of, transfer_of
from passes.ir.mesh import Mesh
from passes.manager import PassManager

c10d = torch.ops._c10d_functional
LAYERS = 4

Seconds = Callable[[Node, int | None], float]  # of a collective; of so many bytes


@dataclass(frozen=True)
class Halves:
    """Forward and backward of a step, each run by itself."""

    timelines: tuple[Timeline, ...]

    @property
    def step(self) -> float:
        return sum(one.step_time for one in self.timelines)

    def __str__(self) -> str:
        exposed = sum(one.exposed for one in self.timelines)
        peak = max(one.peak_memory for one in self.timelines)
        return f"step {self.step * 1e3:8.2f} ms, exposed {exposed * 1e3:8.2f} ms, peak {peak / 1e9:6.2f} GB"


def main() -> None:
    logging.disable(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--layers", type=int, default=LAYERS)
    given = parser.parse_args()
    for name in given.cases or CASES:
        case = CASES[name]
        compare(name, replace(case, config=replace(case.config, layers=given.layers)))


def compare(name: str, case: Case) -> None:
    """Print one case."""
    mesh, options, (model, args) = asked(case)
    split = split_program(make_plan(PlanRequest(model, args, {}, mesh, options)).graph, mode="inductor")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    names = [(mesh.group_name(axes), axes) for axes in axes_used(_graphs(split), mesh)]
    for group, axes in names:
        register_group(group, dist.new_group(list(range(math.prod(map(mesh.axis_size, axes))))))
    nodes = sum(len(gm.graph.nodes) for gm in _graphs(split))
    print(f"{name}: {case.mesh} {case.hardware}, {case.config.layers} layers, {nodes} nodes")
    for judge, seconds in (("our prices", our_seconds(mesh)), ("Inductor's prices", _inductor_seconds)):
        lowered = [_program(gm, mesh, seconds) for gm in _graphs(split)]
        print(f"  {judge}\n    {'as lowered':20} {Halves(tuple(simulate(awaited_at_once(one)) for one in lowered))}")
        theirs: list[Halves] = []
        for what, buckets in (("Inductor", False), ("Inductor, buckets", True)):
            found = [_program(by_inductor(gm, mesh, seconds, buckets=buckets), mesh, seconds) for gm in _graphs(split)]
            theirs.append(Halves(tuple(map(simulate, found))))
            print(f"    {what:20} {theirs[-1]}", flush=True)
        taken = [one.peak_memory for one in min(theirs, key=lambda one: one.step).timelines]
        device = [options.memory_bytes(memory_of(mesh))] * len(taken)
        for what, limits in (("ours, as much", taken), ("ours, device's", device)):
            given = zip(_graphs(split), limits, strict=True)
            ours = [(_by_passes if judge == "our prices" else _ordered)(gm, mesh, options, limit) for gm, limit in given]
            print(f"    {what:20} {Halves(tuple(ours))}", flush=True)
    for group, _ in names:
        unregister_group(group)
    dist.destroy_process_group()


def _graphs(split: Split) -> tuple[GraphModule, ...]:
    return (split.forward,) if split.backward is None else (split.forward, split.backward)


def _by_passes(given: GraphModule, mesh: Mesh, options: Options, limit: int) -> Timeline:
    """Return a copy of a graph after our passes."""
    gm = copy_graph(given)
    overlap = options.hiding or Overlap()
    passes = OverlapPasses(limit, overlap.bucket_bytes).passes
    PassManager(passes).run(gm, PassContext(mesh))
    return simulate(program_of_graph(gm, mesh))


def _ordered(gm: GraphModule, mesh: Mesh, options: Options, limit: int) -> Timeline:
    """Return what our passes would make of a graph with Inductor's times, without chunks: the best of all bucket sizes per
    sort of message."""
    given = program_of_graph(gm, mesh)
    cap, sorts = memory_cap(simulate(given), limit), tuple(seconds_by_sort(given))
    joined: list[Program] = []
    for tried in product(sizes((options.hiding or Overlap()).bucket_bytes), repeat=len(sorts)):
        one = bucket(given, dict(zip(sorts, tried, strict=True)))
        joined += [one] if one not in joined else []
    found = [schedule(_inductor_priced(one), memory_limit=cap).timeline for one in joined]
    return min(found, key=lambda one: (max(0, one.peak_memory - cap), one.step_time))


def _inductor_priced(program: Program) -> Program:
    sizes = {buffer.name: buffer.nbytes for buffer in program.buffers}

    def priced(task: Task) -> Task:
        if not task.is_collective:
            return task
        coll = comm_analysis.get_collective_type_from_kernel_name(task.kind)
        nbytes = sum(sizes[name] for name in (*task.inputs, *task.outputs))
        ranks = math.prod(map(program.mesh.axis_size, task.axes))
        return replace(task, seconds=comm_analysis.estimate_nccl_collective_runtime_impl(nbytes, ranks, coll) / 1e3)

    return replace(program, tasks=tuple(map(priced, program.tasks)))


def _program(gm: GraphModule, mesh: Mesh, seconds: Seconds) -> Program:
    """Return the program of a graph with other times of its collectives."""
    program = program_of_graph(gm, mesh)
    nodes = {node.name: node for node in gm.graph.nodes}
    tasks = (replace(t, seconds=seconds(nodes[t.nodes[-1]], None)) if t.is_collective else t for t in program.tasks)
    return replace(program, tasks=tuple(tasks))


def our_seconds(mesh: Mesh) -> Seconds:
    hardware = mesh.hardware
    assert hardware is not None

    def seconds(node: Node, nbytes: int | None) -> float:
        kind = _kind(node)
        tensors = [*results_of(node), *(result for value in node.all_input_nodes for result in results_of(value))]
        size = max(tensor.numel() * tensor.element_size() for tensor in tensors) if nbytes is None else nbytes
        return collective_seconds(kind, size, mesh.group_shape(mesh.axes_of_group(str(node.args[-1]))), hardware)

    return seconds


def _kind(node: Node) -> str:
    transfer = transfer_of(node)
    if transfer is not None:
        return transfer.kind
    return next(k for k in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") if k in str(node.target))


def _inductor_seconds(node: Node, nbytes: int | None) -> float:
    return comm_analysis.estimate_nccl_collective_runtime_from_fx_node(node, nbytes, use_nccl_estimator=False) / 1e3


def by_inductor(given: GraphModule, mesh: Mesh, seconds: Seconds, *, buckets: bool) -> GraphModule:
    """Return a copy of `given` as Inductor orders it by default."""
    gm = copy_graph(given)
    priced = {name: task.seconds for task in program_of_graph(gm, mesh).tasks for name in task.nodes[-1:]}

    def milliseconds(node: Node, nbytes: int | None = None) -> float:
        is_collective = str(node.target).startswith("_c10d_functional.") and node.target is not c10d.wait_tensor.default
        return 1e3 * (seconds(node, nbytes) if is_collective else priced.get(node.name, 0.0))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds))
        patches.enter_context(mock.patch.object(bucketing, "all_gather_merge_fn_to_trace", _gathered_together))
        return overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=buckets,
            pre_bucketing_fsdp_collectives=buckets,
            custom_runtime_estimation=milliseconds,
            compute_estimator="analytical",
        )


def _gathered_together(
    ag_ins: list[torch.Tensor], group_name: str, group_size: int, dtype: torch.dtype, out_dtypes: Any, rank: int
) -> list[torch.Tensor]:
    """Build Inductor's bucket of gathers without its in-place copy, which a functional program cannot express."""
    whole = c10d.all_gather_into_tensor(torch.cat([one.reshape(-1) for one in ag_ins]), group_size, group_name)
    parts = c10d.wait_tensor(whole).reshape(group_size, -1).split_with_sizes([one.numel() for one in ag_ins], dim=1)
    return [p.reshape((one.shape[0] * group_size, *one.shape[1:])) for p, one in zip(parts, ag_ins, strict=True)]


if __name__ == "__main__":
    main()
