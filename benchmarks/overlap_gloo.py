"""What overlap gains where links are slow, on real ranks: `python -m benchmarks.overlap_gloo`.

Two gloo processes train a Llama of three layers (fsdp, float32, one thread each) over a loopback of 1 Gbit/s in a network
namespace of their own (`unshare`, `ip` and `tc` of Linux). The program as it is lowered and the scheduled one take turns;
prints the median of each one's steps, of their ratios within a round, and what the simulator said of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Mesh, Options, autoshard
from autoshard.compile import split_program
from autoshard.overlap import Overlap
from autoshard.planner import make_plan
from benchmarks.overlap import awaited_at_once
from examples.llama import TINY, Llama
from passes.cost.from_graph import program_of_graph
from passes.cost.simulate import simulate
from passes.ir.hardware import Hardware, Link, hardware_named

RATE = 1e9 / 8  # bytes/s of the loopback, for both ranks together
NAMESPACE = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 512kb latency 500ms && exec "
LAYERS, DIM, BATCH, SEQ = 3, 512, 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.rounds, given.compile)
        return
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 -m benchmarks.overlap_gloo"
    command = f"{torchrun} --rounds {given.rounds} --compile {given.compile}"
    subprocess.run(
        ["unshare", "-n", "sh", "-c", NAMESPACE + command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def hardware() -> Hardware:
    """A core, and half of the loopback: both ranks send at once."""
    link = Link("1 Gbit/s loopback", RATE / 2, latency=1e-3, setup=1e-3)
    return replace(hardware_named("cpu"), name="throttled", inside=link, across=link)


def measure(rounds: int, compiled: Literal["inductor", "eager"]) -> None:
    """One rank of the two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama(replace(TINY, layers=LAYERS, dim=DIM, hidden=3 * DIM, heads=8, kv_heads=8, seq=SEQ))
    tokens = torch.randint(TINY.vocab, (BATCH, SEQ))
    options = Options(recipe="fsdp", hardware=hardware(), compile=compiled, bucket_bytes=4 << 20)
    if dist.get_rank() == 0:
        predict(model, (tokens, tokens), options)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    variants = [autoshard(model, mesh, (tokens, tokens), options=replace(options, overlap=on)) for on in (False, True)]
    batch = variants[0].shard(tokens, tokens)
    found: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for variant, seconds in zip(variants, found, strict=True):
            dist.barrier()
            started = time.perf_counter()
            variant(*batch).backward()
            dist.barrier()
            if number:
                seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        ratio = statistics.median(after / before for before, after in zip(*found, strict=True))
        before, after = (statistics.median(seconds) for seconds in found)
        print(f"measured: as lowered {before:.3f} s, scheduled {after:.3f} s, ratio {ratio:.3f}", flush=True)
    dist.destroy_process_group()


def predict(model: Llama, args: tuple[torch.Tensor, torch.Tensor], options: Options) -> None:
    mesh = Mesh("dp=2", hardware=hardware())
    split = split_program(make_plan(model, args, {}, mesh, options).graph, mode=options.compile)
    fused = options.compile == "inductor"
    graphs = (split.forward, split.backward)
    programs = [program_of_graph(gm, mesh, fused=fused) for gm in graphs if gm is not None]
    before = [simulate(awaited_at_once(program)) for program in programs]
    overlap = Overlap.of(options, mesh)
    assert overlap is not None
    overlap.apply(split, mode=options.compile)
    after = [simulate(program_of_graph(gm, mesh, fused=fused)) for gm in graphs if gm is not None]
    steps = [sum(one.step_time for one in timelines) for timelines in (before, after)]
    compute, communication = sum(one.compute for one in before), sum(one.communication for one in before)
    print(f"predicted: as lowered {steps[0]:.3f} s, scheduled {steps[1]:.3f} s, ratio {steps[1] / steps[0]:.3f}")
    print(f"  of which compute {compute:.3f} s, communication {communication:.3f} s", flush=True)


if __name__ == "__main__":
    main()
