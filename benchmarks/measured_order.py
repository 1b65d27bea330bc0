"""Hold the order that is predicted for plans against the one measured: `python -m benchmarks.measured_order`.

Four gloo processes train one Llama under plans of different kinds. They are on two nodes: network namespaces of their own, each
with a loopback of 2 Gbit/s, joined by a link of 0.5 Gbit/s (`unshare`, `nsenter`, `ip` and `tc` of Linux, as root). `calibrate`
measures device and links there first; all steps are predicted by its figures. Plans take turns, one step each; the median of
`--rounds` counts. Prints plans by predicted time, with the measured one and the ratio, and the rank correlation of the two
orders. Words choose the plans with all of them in their names. Another load on the cores makes the result worthless.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Mesh, Options, ShardedModule, autoshard
from autoshard.measure.calibrate import calibrate
from benchmarks.overlap_gloo import before_others
from examples.llama import TINY, Llama

NODES, LOCAL, AXES = 2, 2, "dp=2,tp=2"  # `tp` is in a node, `dp` between nodes
INSIDE, ACROSS = "2gbit", "0.5gbit"
PORT = 29533
LAYERS, DIM, BATCH, SEQ = 3, 256, 16, 128


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
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.words, given.rounds, is_quick=given.quick)
    elif given.inside:
        launch([word for word in sys.argv[1:] if word != "--inside"])
    else:
        command = ["unshare", "-n", sys.executable, "-m", "benchmarks.measured_order", "--inside", *sys.argv[1:]]
        subprocess.run(command, check=True)


# Network -----------------------------------------------------------------------------------------------------------------


def launch(arguments: Sequence[str]) -> None:
    """Start the ranks of both nodes; this process is in the first one's namespace."""
    with _second_node() as enter:
        begun = [
            subprocess.Popen([*before, *_torchrun(node, arguments)], env=_environment(node))
            for node, before in enumerate(((), enter))
        ]
        if any([one.wait() for one in begun]):
            raise SystemExit("a node failed: its error is above")


@contextmanager
def _second_node() -> Iterator[tuple[str, ...]]:
    """Make the second namespace and the links; yield the command that runs another one there."""
    holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    enter = ("nsenter", "-t", str(holder.pid), "-n")
    try:
        _run((), f"ip link add node0 type veth peer name node1 netns {holder.pid}")
        for node, before in enumerate(((), enter)):
            _run(before, "ip link set lo up")
            _run(before, f"ip addr add {_address(node)}/24 dev node{node}")
            _run(before, f"ip link set node{node} up")
            for device, rate in (("lo", INSIDE), (f"node{node}", ACROSS)):
                _run(before, f"tc qdisc add dev {device} root tbf rate {rate} burst 128kb latency 500ms")
        yield enter
    finally:
        holder.kill()


def _run(before: tuple[str, ...], command: str) -> None:
    subprocess.run([*before, *command.split()], check=True)


def _address(node: int) -> str:
    return f"10.9.8.{node + 1}"


def _environment(node: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"node{node}"}


def _torchrun(node: int, arguments: Sequence[str]) -> list[str]:
    where = f"--nnodes {NODES} --node-rank {node} --nproc-per-node {LOCAL} --master-addr {_address(0)} --master-port {PORT}"
    return [sys.executable, "-m", "torch.distributed.run", *where.split(), "-m", "benchmarks.measured_order", *arguments]


# Measurement -------------------------------------------------------------------------------------------------------------


def measure(words: Sequence[str], rounds: int, *, is_quick: bool) -> None:
    """Run one rank."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with before_others():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama(replace(TINY, layers=LAYERS, dim=DIM, hidden=3 * DIM, heads=8, kv_heads=8, seq=SEQ))
    tokens = torch.randint(TINY.vocab, (BATCH, SEQ))
    machine = replace(calibrate(AXES, is_quick=is_quick).hardware, name="two nodes")
    mesh = Mesh(AXES, hardware=machine)
    devices = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    options = Options(hardware=machine, compile="eager", optimizer=None)
    kinds = [kind for kind in KINDS if all(word in kind.name for word in words)]
    trained = [
        autoshard(model, devices, (tokens, tokens), options=replace(options, recipe=kind.recipe, overlap=kind.overlap))
        for kind in kinds
    ]
    measured = _in_turns(trained, (tokens, tokens), rounds)
    if dist.get_rank() == 0:
        report([kind.name for kind in kinds], [_predicted(one) for one in trained], measured)
    dist.destroy_process_group()


def _predicted(trained: ShardedModule) -> float:
    assert trained.plan.cost is not None, "the hardware is known"
    return trained.plan.cost.step_time


def _in_turns(trained: Sequence[ShardedModule], args: tuple[Tensor, ...], rounds: int) -> list[float]:
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
