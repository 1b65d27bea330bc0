"""Measure ring attention against gathered keys and values where links are slow: `python -m benchmarks.context_ring`.

Gloo processes, each on a node of its own (`benchmarks/throttled.py`, as root), train a small Llama on one long sequence that is
sharded over them, with `context(ring)` and with `context(gather)`; gloo's threads have priority, as in
`benchmarks/overlap_gloo.py`, and the compute thread of each rank has a part of a core. `calibrate` measures device and links
before each length, and all its steps are predicted by these figures. The two take turns, one step each; the median of `--rounds`
counts. Prints, per length, measured and predicted steps with their ratio, the ring as a part of the gather, and whether the way
that is predicted to be faster is the faster one. With `--profile`, also what each message and the calls of each module take
alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import Options, autoshard
from autoshard.measure.calibrate import calibrate, format_calibration
from benchmarks.measured_order import in_turns, predicted_seconds
from benchmarks.overlap_gloo import before_others
from benchmarks.throttled import INSIDE_FLAG, Network, run, steady_device
from examples.llama import TINY, Llama
from passes.hardware.hardware import Hardware

WAYS = ("ring", "gather")
LENGTHS = (256, 1024, 2048, 4096)
LAYERS, DIM, HEADS = 2, 256, 4
CORE = 0.6  # of a core for each of two ranks: the rest of two cores is left to gloo


@dataclass(frozen=True)
class Steps:
    """Predicted and measured seconds of a step at one length, by `WAYS`."""

    length: int
    predicted: tuple[float, ...]
    measured: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="by default 2: each has a core of two")
    parser.add_argument("--rate", default="0.5gbit", help="of each node's link, as tc takes it")
    parser.add_argument("--kv-heads", type=int, default=HEADS, help=f"of {HEADS} heads")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print also what each message and each module takes alone")
    parser.add_argument("--quick", action="store_true", help="calibrate quickly: to try the benchmark out")
    parser.add_argument(INSIDE_FLAG, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.lengths, given.kv_heads, given.rounds, is_quick=given.quick, profiles=given.profile)
    else:
        run("benchmarks.context_ring", Network(given.ranks, 1, "10gbit", given.rate), sys.argv[1:])


def measure(lengths: Sequence[int], kv_heads: int, rounds: int, *, is_quick: bool, profiles: bool) -> None:
    """Run one rank."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with before_others(is_realtime=False):
        dist.init_process_group("gloo")
        devices = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for length in lengths:
        with steady_device(CORE):  # before each length, as a machine that others share is slower at times
            calibration = calibrate(devices, is_quick=is_quick)
        if dist.get_rank() == 0:
            print(format_calibration(calibration), flush=True)
        machine = replace(calibration.hardware, name=f"throttled, {length}")
        steps = _steps(length, kv_heads, machine, devices, rounds, profiles=profiles)
        if dist.get_rank() == 0:
            print("\n".join(lines(steps)), flush=True)
    dist.destroy_process_group()


def _steps(
    length: int, kv_heads: int, machine: Hardware, devices: DeviceMesh, rounds: int, *, profiles: bool
) -> Steps:
    torch.manual_seed(0)
    model = Llama(replace(TINY, layers=LAYERS, dim=DIM, hidden=2 * DIM, heads=HEADS, kv_heads=kv_heads, seq=length))
    tokens = torch.randint(TINY.vocab, (1, length))
    options = Options(hardware=machine, compile="eager", optimizer=None, progress=False)
    trained = [
        autoshard(model, devices, (tokens, tokens), options=replace(options, recipe=f"context({way})")) for way in WAYS
    ]
    predicted = tuple(map(predicted_seconds, trained))
    with steady_device(CORE):
        measured = in_turns(trained, (tokens, tokens), rounds)
        found = [one.profile(*one.shard(tokens, tokens)) for one in trained if profiles]
    if dist.get_rank() == 0:
        print("\n".join(map(str, found)), flush=True)
    return Steps(length, predicted, tuple(measured))


def lines(steps: Steps) -> list[str]:
    """Return the text of a length: a line for each way, and one that compares them."""
    pairs = list(zip(WAYS, steps.predicted, steps.measured, strict=True))
    predicted, measured = (ring / gather for ring, gather in (steps.predicted, steps.measured))
    agrees = "the same winner" if (predicted < 1) == (measured < 1) else "NOT the same winner"
    return [
        *(
            f"{steps.length:6} {way:6} predicted {one:7.3f} s, measured {other:7.3f} s, ratio {one / other:.3f}"
            for way, one, other in pairs
        ),
        f"{steps.length:6} ring / gather: predicted {predicted:.3f}, measured {measured:.3f}: {agrees}",
    ]


if __name__ == "__main__":
    main()
