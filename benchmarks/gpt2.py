"""What autoshard costs and gains on GPT-2 (124M parameters), on CPU processes with gloo.

    python -m benchmarks.gpt2                        # 12 layers; a quarter of an hour on two cores
    python -m benchmarks.gpt2 --layers 2 --rounds 3  # a look

Prints, all from one run:

1. one process: the time of a training step beside `torch.compile` of the plain model, the overhead of a mesh of
   size 1;
2. four processes, mesh dp=2, tp=2: the time to capture, propagate, rewrite and compile (Inductor, empty cache);
   the time of a training step by hand (`fully_shard` per block, `parallelize_module` with sequence and loss
   parallelism, each block compiled), of autoshard (fsdp x megatron), and of `DistributedDataParallel`, compiled;
   and how far each one's losses are from those of the plain model, trained beside them on the same global batch.

A step is forward, backward and AdamW. Variants take turns, so that whatever else the machine does hits all alike;
times are medians over rounds, ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autoshard import Options, autoshard
from autoshard.compile.compiled import compile_split, split_program
from autoshard.config.topology import mesh_of
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from examples.gpt import GPT, GPT2, Config

Batch = tuple[Tensor, Tensor]
RECIPE = {"dp": "fsdp", "tp": "megatron"}


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        return launch()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, width=120)
    try:
        run = compare_alone if dist.get_world_size() == 1 else compare_on_mesh
        run(arguments, console)
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=GPT2.layers)
    parser.add_argument("--batch", type=int, default=4, help="sequences in the global batch")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    return parser.parse_args()


def launch() -> None:
    """Run this file on one process, then on four, with an empty Inductor cache and one thread per process."""
    for processes in (1, 4):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command = [*torchrun, "-m", "benchmarks.gpt2", *sys.argv[1:]]
            subprocess.run(command, env=environment, check=True)


def compare_alone(arguments: argparse.Namespace, console: Console) -> None:
    config, batch = make_config(arguments), make_batch(arguments)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    variants = [
        Variant("torch.compile", torch.compile(make_model(config)), batch),
        shard_automatically(config, batch, mesh),
    ]
    run_in_turns(variants, arguments, console)
    print_steps(variants, f"one process: a mesh of size 1, {config.layers} layers", console)


def compare_on_mesh(arguments: argparse.Namespace, console: Console) -> None:
    config, batch = make_config(arguments), make_batch(arguments)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    print_compile_times(config, batch, mesh, console)
    variants = [
        shard_by_hand(config, batch, mesh),
        shard_automatically(config, batch, mesh),
        replicate(config, batch),
    ]
    expected = train_plainly(config, batch, steps=arguments.warmup)
    run_in_turns(variants, arguments, console)
    print_steps(variants, f"four processes: dp=2, tp=2, {config.layers} layers", console)
    print_losses(variants, expected, console)


def make_config(arguments: argparse.Namespace) -> Config:
    return replace(GPT2, layers=arguments.layers)


def make_model(config: Config) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def make_batch(arguments: argparse.Namespace) -> Batch:
    torch.manual_seed(1)
    tokens = torch.randint(GPT2.vocab, (arguments.batch, arguments.seq + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Variant:
    """One way to train the same model, with its measurements."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        batch: Batch,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.name, self.model, self.batch, self.context = name, model, batch, context
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Train for one step; it ends when all ranks have."""
        started = time.perf_counter()
        with self.context():
            loss = self.model(*self.batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(global_mean(loss.detach()))


def global_mean(loss: Tensor) -> float:
    """Return the loss of the global batch, from the loss of this rank's part or of all."""
    local = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
    dist.all_reduce(local)
    return local.item() / dist.get_world_size()


def shard_automatically(config: Config, batch: Batch, mesh: DeviceMesh) -> Variant:
    model = autoshard(make_model(config), mesh, args=batch, options=Options(recipe=RECIPE))
    return Variant("autoshard", model, model.shard(*batch))


def replicate(config: Config, batch: Batch) -> Variant:
    model = torch.compile(DistributedDataParallel(make_model(config)))
    return Variant("DDP + torch.compile", model, part_of(batch, dist.get_rank(), dist.get_world_size()))


def shard_by_hand(config: Config, batch: Batch, mesh: DeviceMesh) -> Variant:
    """Shard by FSDP2 x Megatron with sequence and loss parallelism, as torchtitan writes it."""
    model = make_model(config)
    sequence = Shard(1)
    for block in model.blocks:
        group_by_rank(block.attn.qkv, mesh["tp"].size())
    plan = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "pos": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)
    model.head.weight = model.tok.weight  # parallelize_module has untied them
    block_plan = {
        "norm1": SequenceParallel(),
        "attn": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
        "attn.qkv": ColwiseParallel(),
        "attn.proj": RowwiseParallel(output_layouts=sequence),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=sequence),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], block_plan)
        block.compile()
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    local_batch = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
    return Variant("by hand", model, local_batch, loss_parallel)


@torch.no_grad()
def group_by_rank(qkv: nn.Linear, ranks: int) -> None:
    """Reorder the rows of a fused projection so that a contiguous part holds one rank's q, k and v."""
    for parameter in (qkv.weight, qkv.bias):
        parameter.copy_(parameter.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2))


def part_of(batch: Batch, part: int, parts: int) -> Batch:
    tokens, labels = (tensor.chunk(parts)[part] for tensor in batch)
    return tokens, labels


def train_plainly(config: Config, batch: Batch, *, steps: int) -> list[float]:
    """Return losses of the plain model on one device, on the first rank only."""
    losses = []
    if dist.get_rank() == 0:
        model = make_model(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for _ in range(steps):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    dist.barrier()
    return losses


def run_in_turns(variants: list[Variant], arguments: argparse.Namespace, console: Console) -> None:
    for number in range(arguments.warmup + arguments.rounds):
        for variant in variants:
            variant.step()
        console.print(f"round {number}: " + ", ".join(f"{v.name} {v.seconds[-1]:.2f} s" for v in variants), style="dim")
    for variant in variants:
        del variant.seconds[: arguments.warmup]


def print_steps(variants: list[Variant], title: str, console: Console) -> None:
    """Print step times, and their ratios to the first variant's."""
    table = Table("", "median", "fastest", f"/ {variants[0].name}", title=f"seconds per training step, {title}")
    for variant in variants:
        ratios = [mine / first for mine, first in zip(variant.seconds, variants[0].seconds, strict=True)]
        times = statistics.median(variant.seconds), min(variant.seconds)
        table.add_row(variant.name, *(f"{seconds:.3f}" for seconds in times), f"{statistics.median(ratios):.3f}")
    console.print(table)


def print_losses(variants: list[Variant], expected: list[float], console: Console) -> None:
    """Print each variant's first losses next to the plain model's."""
    table = Table("step", "one device", *(variant.name for variant in variants), title="loss")
    for step, loss in enumerate(expected):
        table.add_row(str(step), f"{loss:.6f}", *(f"{variant.losses[step]:.6f}" for variant in variants))
    console.print(table)


def print_compile_times(config: Config, batch: Batch, mesh: DeviceMesh, console: Console) -> None:
    """Time the phases from module to compiled code on the first rank; the others find its code cached."""
    with torch.device("meta"):
        model = GPT(config)
    # Inductor asks for the groups of the collectives, which a sharded model opens.
    autoshard(model, mesh, args=batch, options=Options(recipe=RECIPE, compile="eager"))
    if dist.get_rank() == 0:
        started = time.perf_counter()
        planned = make_plan(PlanRequest(model, batch, {}, mesh_of(mesh), Options(recipe=RECIPE)))
        planning = time.perf_counter() - started
        started = time.perf_counter()
        split = split_program(planned.graph, mode="inductor")
        partition = time.perf_counter() - started
        started = time.perf_counter()
        compile_split(split, mode="inductor")
        inductor = time.perf_counter() - started
        passes = {name: seconds for name, seconds in planned.seconds.items() if name != "capture"}
        rewriting = sum(seconds for name, seconds in passes.items() if name != "propagate")
        table = Table("phase", "seconds", title=f"compiling, dp=2, tp=2, {config.layers} layers")
        table.add_row("capture", f"{planned.seconds['capture']:.2f}")
        table.add_row("propagation", f"{passes['propagate']:.2f}")
        table.add_row("rewriting: " + ", ".join(f"{n} {s:.2f}" for n, s in passes.items()), f"{rewriting:.2f}")
        table.add_row("checks between passes, and the plan's text", f"{planning - sum(planned.seconds.values()):.2f}")
        table.add_row("partition", f"{partition:.2f}")
        table.add_row("Inductor, empty cache", f"{inductor:.2f}")
        console.print(table)
    dist.barrier()


if __name__ == "__main__":
    main()
