"""Hold the order that is predicted for plans against the one measured: `python -m benchmarks.measured_order`.

Four gloo processes train one Llama under plans of different kinds. They are on two nodes (`benchmarks/throttled.py`, as root),
each with a loopback of 2 Gbit/s, joined by links of 0.5 Gbit/s; gloo's threads have priority, as in
`benchmarks/overlap_gloo.py`, and the compute thread of each rank has a part of a core. `calibrate` measures device and links
first; all steps are predicted by its figures. Plans take turns, one step each; the median of `--rounds` counts. Prints plans by
predicted time, with the measured one and the ratio, and the rank correlation of the two orders. Words choose the plans with all
of them in their names. Another load on the cores makes the result worthless.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Mesh, Options, ShardedModule, autoshard
from autoshard.measure.calibrate import calibrate, format_calibration
from benchmarks.overlap_gloo import before_others
from benchmarks.throttled import INSIDE_FLAG, Network, run, steady_device
from examples.llama import TINY, Llama
from passes._torch import register_group

NETWORK = Network(nodes=2, local=2, inside="2gbit", across="0.5gbit")
AXES = "dp=2,tp=2"  # `tp` is in a node, `dp` between nodes
LAYERS, DIM, BATCH, SEQ = 3, 256, 16, 128
CORE = 0.4  # of a core for each of four ranks: of two cores, a fifth is left to gloo


@dataclass(frozen=True)
class Kind:
    """A kind of plan: its recipes over the axes, and whether messages are hidden."""

    recipe: str
    overlap: bool = True

    @property
    def name(self) -> str:
        return self.recipe if self.overlap else f"{self.recipe}, awaited"


KINDS = (
    *map(Kind, ("ddp", "zero2", "fsdp", "ddp+fsdp", "megatron", "ddp+megatron", "zero2+megatron", "fsdp+megatron")),
    Kind("fsdp", overlap=False),
    Kind("fsdp+megatron", overlap=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of plans; by default all plans")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="calibrate quickly: to try the benchmark out")
    parser.add_argument(INSIDE_FLAG, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.words, given.rounds, is_quick=given.quick)
    else:
        run("benchmarks.measured_order", NETWORK, sys.argv[1:])


# Measurement -------------------------------------------------------------------------------------------------------------


def measure(words: Sequence[str], rounds: int, *, is_quick: bool) -> None:
    """Run one rank."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    mesh = Mesh(AXES)
    with before_others():
        dist.init_process_group("gloo")
        devices = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    register_group(mesh.group_name(mesh.names), dist.group.WORLD)
    torch.manual_seed(0)
    model = Llama(replace(TINY, layers=LAYERS, dim=DIM, hidden=3 * DIM, heads=8, kv_heads=8, seq=SEQ))
    tokens = torch.randint(TINY.vocab, (BATCH, SEQ))
    with steady_device(CORE):
        calibration = calibrate(devices, is_quick=is_quick)
    machine = replace(calibration.hardware, name="two nodes")
    if dist.get_rank() == 0:
        print(format_calibration(calibration))
    options = Options(hardware=machine, compile="eager", optimizer=None, progress=False)
    kinds = [kind for kind in KINDS if all(word in kind.name for word in words)]
    trained = [
        autoshard(model, devices, (tokens, tokens), options=replace(options, recipe=kind.recipe, overlap=kind.overlap))
        for kind in kinds
    ]
    with steady_device(CORE):
        measured = in_turns(trained, (tokens, tokens), rounds)
    if dist.get_rank() == 0:
        report([kind.name for kind in kinds], [predicted_seconds(one) for one in trained], measured)
    dist.destroy_process_group()


def predicted_seconds(trained: ShardedModule) -> float:
    assert trained.plan.cost is not None, "the hardware is known"
    return trained.plan.cost.step_time


def in_turns(trained: Sequence[ShardedModule], args: tuple[Tensor, ...], rounds: int) -> list[float]:
    """Return the median seconds of a step of each; the first round warms up."""
    batches, found = [one.shard(*args) for one in trained], [list[float]() for _ in trained]
    for number in range(rounds + 1):
        for one, batch, seconds in zip(trained, batches, found, strict=True):
            dist.barrier()
            started = time.perf_counter()
            one(*batch).backward()
            dist.barrier()
            if number:
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in found]


def report(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> None:
    """Print the plans by predicted time, and how well the orders agree."""
    order = sorted(range(len(names)), key=predicted.__getitem__)
    for number in order:
        ratio = predicted[number] / measured[number]
        print(f"{names[number]:24} predicted {predicted[number]:6.3f} s, measured {measured[number]:6.3f} s, ratio {ratio:.3f}")
    print(f"{len(names)} plans, rank correlation {correlation(predicted, measured):.3f}", flush=True)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values that differ."""
    return statistics.correlation(_ranks(one), _ranks(other)) if len(one) > 1 else 1.0


def _ranks(values: Sequence[float]) -> list[int]:
    return [sum(other < value for other in values) for value in values]


if __name__ == "__main__":
    main()
