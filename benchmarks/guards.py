"""Measure what a call pays to see that the model is still as it was captured.

    python -m benchmarks.guards
    python -m benchmarks.guards --modules 10000

On a mesh of one rank in this process; the model is a list of linear layers and activations, and nothing of it runs but
the check. The figure is the fastest of several rounds, in CPU time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard

ROUNDS, CALLS = 20, 100


def main() -> None:
    """Print the microseconds of a check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=1000)
    modules = parser.parse_args().modules
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in an __all__
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    layers = [nn.Linear(2, 2) if number % 2 else nn.ReLU() for number in range(modules)]
    sharded: Any = autoshard(nn.Sequential(*layers), mesh, options=Options(recipe="ddp", compile="eager"))
    states, kind = sharded._autoshard.states, nn.Sequential
    states.update(sharded, kind)
    assert states.is_current()
    print(f"{modules} modules, {len(list(sharded.parameters()))} parameters: {seconds(states.is_current) * 1e6:.1f} us a call")
    sharded[1].bias.requires_grad_(False)
    assert not states.is_current()
    dist.destroy_process_group()


def seconds(check: Any) -> float:
    """Return the CPU seconds of one check."""
    found = []
    for _ in range(ROUNDS):
        before = time.process_time()
        for _ in range(CALLS):
            check()
        found.append((time.process_time() - before) / CALLS)
    return min(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
