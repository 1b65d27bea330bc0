"""What overlap gains where links are slow, on real ranks: `python -m benchmarks.overlap_gloo`.

Two gloo processes (`--ranks 4`: four) train a Llama of three layers (fsdp, float32, one thread each) over a loopback of
1 Gbit/s (3 Gbit/s) in a network namespace of their own (`unshare`, `ip` and `tc` of Linux): the same model and batch, on two
cores, with communication of 70 to 100 % of compute. Gloo's threads have priority over compute threads, so that bytes move
as a network card moves them, without waiting for time slices (`--time-slices`: they wait, as any thread does). Three programs
take turns: as lowered; in our order; in the order of Inductor's bucketing and overlap scheduling, with or without buckets,
whichever is predicted to be faster. All are scheduled by the figures that `calibrate` measures first. Prints medians of step
times and of their ratios within a round, the predictions, and the part of the predicted gain that arrived.
`--trace FOLDER` writes one step of each, as the first rank ran it, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

from autoshard import Mesh, Options, ShardedModule, autoshard
from autoshard.compile.compiled import Mode, Split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.measure.calibrate import calibrate
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from benchmarks.overlap import awaited_at_once
from benchmarks.overlap_inductor import by_inductor, our_seconds
from examples.llama import TINY, Llama
from passes._torch import register_group, registered_group, unregister_group
from passes.base import Remark
from passes.cost.build_program import program_of_graph
from passes.cost.program import Program
from passes.cost.simulate import simulate
from passes.hardware.hardware import Hardware

# All ranks send through one loopback, k of them (k - 1) / k of a ring's bytes each: with 1 Gbit/s for each rank but one, a
# collective takes as long over four ranks as over two.
RATE = 1  # Gbit/s, times ranks less one
NAMESPACE = "ip link set lo up && tc qdisc add dev lo root tbf rate {rate}gbit burst 128kb latency 500ms && exec "
LAYERS, DIM, BATCH, SEQ = 3, 512, 16, 256  # communication is 70 to 100 % of compute
VARIANTS = ("as lowered", "ours", "Inductor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--compile", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--time-slices", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.rounds, given.compile, given.trace, waits=given.time_slices)
        return
    launch = f"torch.distributed.run --nproc-per-node {given.ranks} --master-addr 127.0.0.1 -m benchmarks.overlap_gloo"
    command = f"{sys.executable} -m {launch} " + " ".join(sys.argv[1:])
    namespace = NAMESPACE.format(rate=RATE * (given.ranks - 1))
    subprocess.run(
        ["unshare", "-n", "sh", "-c", namespace + command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def hardware(ranks: int) -> Hardware:
    """Measure this machine while all ranks compute at once, and the loopback while all send."""
    return replace(calibrate(f"dp={ranks}").hardware, name="throttled")


@dataclass(frozen=True)
class _Inductors:
    """Replace `OverlapPhase.apply`: Inductor orders both graphs of a program, in place."""

    mesh: Mesh

    def __call__(self, split: Split, *, mode: Mode) -> tuple[Remark, ...]:
        name = self.mesh.group_name(self.mesh.names)
        is_ours = registered_group(name) is None
        if is_ours:
            register_group(name, dist.group.WORLD)
        for gm in _graphs(split):
            tried = [by_inductor(gm, self.mesh, our_seconds(self.mesh), buckets=on) for on in (False, True)]
            best = min(tried, key=lambda one: simulate(_program(one, self.mesh, mode)).step_time)
            gm.graph = best.graph
        if is_ours:
            unregister_group(name)
        return ()


def measure(rounds: int, compiled: Literal["inductor", "eager"], trace: Path | None, *, waits: bool) -> None:
    """Run one rank."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with nullcontext() if waits else before_others():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama(replace(TINY, layers=LAYERS, dim=DIM, hidden=3 * DIM, heads=8, kv_heads=8, seq=SEQ))
    tokens = torch.randint(TINY.vocab, (BATCH, SEQ))
    mesh = Mesh(f"dp={dist.get_world_size()}", hardware=hardware(dist.get_world_size()))
    options = Options(recipe="fsdp", hardware=mesh.hardware, compile=compiled)
    predicted = predict(model, (tokens, tokens), mesh, options)
    devices = init_device_mesh("cpu", (mesh.size,), mesh_dim_names=("dp",))
    variants = [_variant(name, model, (tokens, tokens), devices, mesh, options) for name in VARIANTS]
    batch = variants[0].shard(tokens, tokens)
    found: list[list[float]] = [[] for _ in VARIANTS]
    for number in range(rounds + 1):
        turns = list(zip(variants, found, strict=True))
        for variant, seconds in turns[number % len(turns) :] + turns[: number % len(turns)]:
            dist.barrier()
            started = time.perf_counter()
            variant(*batch).backward()
            dist.barrier()
            if number:
                seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        report(predicted, found)
    if trace is not None:
        write_traces(trace, variants, batch)
    dist.destroy_process_group()


@contextmanager
def before_others(*, is_realtime: bool = True) -> Iterator[None]:
    """Give threads that are started meanwhile priority: gloo's then move bytes as a network card does, without waiting for a
    time slice.

    A thread of gloo polls while another one holds the lock of a connection. Where compute threads send themselves, as in a ring,
    a poll in real time would keep the thread that has the lock from its core: `is_realtime=False` lets it have a part of it.
    """
    if is_realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    else:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, 0)


def _variant(
    name: str, model: Llama, args: tuple[Tensor, ...], devices: DeviceMesh, mesh: Mesh, options: Options
) -> ShardedModule:
    with ExitStack() as patches:
        if name == "Inductor":
            patches.enter_context(mock.patch.object(OverlapPhase, "apply", _Inductors(mesh)))
        return autoshard(model, devices, args, options=replace(options, overlap=name != "as lowered"))


def predict(model: Llama, args: tuple[Tensor, Tensor], mesh: Mesh, options: Options) -> list[float]:
    """Return seconds of a step of each variant, and print their parts."""
    mode, overlap = options.compile, OverlapPhase.of(options, mesh)
    assert overlap is not None
    graph = make_plan(PlanRequest(model, args, {}, mesh, options)).graph
    lowered, ours, inductors = (split_program(graph, mode=mode) for _ in VARIANTS)
    programs = [_program(gm, mesh, mode) for gm in _graphs(lowered)]
    overlap.apply(ours, mode=mode)
    _Inductors(mesh)(inductors, mode=mode)
    steps = [sum(simulate(awaited_at_once(one)).step_time for one in programs)]
    steps += [sum(simulate(_program(gm, mesh, mode)).step_time for gm in _graphs(split)) for split in (ours, inductors)]
    if dist.get_rank() == 0:
        timelines = [simulate(one) for one in programs]
        compute, communication = sum(one.compute for one in timelines), sum(one.communication for one in timelines)
        print(f"predicted: compute {compute:.3f} s, communication {communication:.3f} s", flush=True)
    return steps


def report(predicted: Sequence[float], found: Sequence[Sequence[float]]) -> None:
    for name, promised, seconds in zip(VARIANTS, predicted, found, strict=True):
        ratio = statistics.median(after / before for before, after in zip(found[0], seconds, strict=True))
        gain = statistics.median(before - after for before, after in zip(found[0], seconds, strict=True))
        line = f"{name:10} predicted {promised:.3f} s ({promised / predicted[0]:.3f})"
        line += f", measured {statistics.median(seconds):.3f} s ({ratio:.3f})"
        if promised < predicted[0]:
            line += f", gained {gain:.3f} of {predicted[0] - promised:.3f} s: {gain / (predicted[0] - promised):.0%}"
        print(line, flush=True)


def write_traces(folder: Path, variants: Sequence[ShardedModule], batch: tuple[Tensor, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, variant in zip(VARIANTS, variants, strict=True):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            variant(*batch).backward()
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(folder / f"{name.replace(' ', '_')}.json"))


def _graphs(split: Split) -> tuple[GraphModule, ...]:
    return (split.forward,) if split.backward is None else (split.forward, split.backward)


def _program(gm: GraphModule, mesh: Mesh, mode: Mode) -> Program:
    return program_of_graph(gm, mesh, fused=mode == "inductor")


if __name__ == "__main__":
    main()
