"""Measure what the programs of further shapes cost, beside the first one's.

    python -m benchmarks.second_shape
    python -m benchmarks.second_shape --recipe auto --layers 24

Two gloo processes, run op by op (`compile="eager"`): a GPT of 12 layers is trained on batches of three shapes. Printed are
the seconds of the first rank, CPU and wall, for each shape's first call and for its second one.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from autoshard import Options, autoshard
from examples.gpt import GPT, Config

RANKS = 2
SHAPES = ((8, 64), (8, 48), (6, 64))


def main() -> None:
    """Run the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fsdp")
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_rank, (port, given.recipe, given.layers), nprocs=RANKS)


def _rank(rank: int, port: int, recipe: str, layers: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = autoshard(GPT(Config(layers=layers)), mesh, options=Options(recipe=recipe, compile="eager"))
    first = 0.0
    for batch, length in SHAPES:
        tokens = torch.zeros(batch // RANKS, length, dtype=torch.long)
        for call in ("first", "second"):
            cpu, wall = time.process_time(), time.perf_counter()
            model(tokens, tokens).backward()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            first = first or cpu
            if rank == 0:
                print(
                    f"{recipe}, {layers} layers, {batch} x {length} tokens, {call} call: {cpu:.2f} s of CPU, "
                    f"{wall:.2f} s in all, {cpu / first:.2f} of the first program",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
