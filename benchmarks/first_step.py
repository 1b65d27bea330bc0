"""Measure what the first step costs a new user, beside what `torch.compile` takes for the same model.

    python -m benchmarks.first_step

A GPT of two layers of width 32, with empty caches: compiled by `torch.compile` in one process, and sharded over two gloo
processes by `autoshard(model, mesh)` without options. Printed are the seconds of the first forward and backward of the first
rank: of CPU, with those of the C++ compilers that it starts, and in all.
"""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from autoshard import autoshard
from examples.gpt import GPT, Config

RANKS = 2
SHAPE = (4, 16)  # of a rank's tokens


def main() -> None:
    """Run both ways, each with caches of its own."""
    for ranks in (1, RANKS):
        with tempfile.TemporaryDirectory() as cache, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHINDUCTOR_CACHE_DIR=cache,
                TORCHINDUCTOR_COMPILE_THREADS="1",  # a pool of processes would not be counted
            )
            spawn(_rank, (ranks,), nprocs=ranks)


def _rank(rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = GPT(Config(layers=2, dim=32, heads=4))
    model: Any
    if ranks == 1:
        model, name = torch.compile(plain), "torch.compile, one process"
    else:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        model = autoshard(plain, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
        name = f"autoshard, {ranks} processes, no options"
    tokens = torch.randint(16, SHAPE, generator=torch.Generator().manual_seed(rank))
    cpu, wall = _cpu_seconds(), time.perf_counter()
    model(tokens, tokens).backward()
    cpu, wall = _cpu_seconds() - cpu, time.perf_counter() - wall
    if rank == 0:
        print(f"{name}: first step {cpu:.1f} s of CPU, {wall:.1f} s in all", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def _cpu_seconds() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in uses)


if __name__ == "__main__":
    main()
