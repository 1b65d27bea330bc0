"""Train a small GPT on the standard library's source with four CPU processes, and check it against one device.

    python examples/train_gpt.py                     # starts torchrun itself: dp=2, tp=2, fsdp x megatron
    python examples/train_gpt.py --mesh dp=4 --recipe dp=zero2
    python examples/train_gpt.py --single            # the one-device run alone

The model (gpt.py) and the text (corpus.py) know nothing about a mesh. Prints the plan, the losses of both runs side by
side, their tokens per second, and a sample that the sharded model writes.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from corpus import Corpus
from gpt import GPT, Config
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.distributed import run as torchrun
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard

CONFIG = Config(layers=4, dim=128, heads=4, vocab=1024, seq=64)
BATCH = 32
LEARNING_RATE = 2e-3
WARMUP = 20  # steps
TEMPERATURE = 0.5


@dataclass(frozen=True)
class History:
    """The record of a training run."""

    name: str
    losses: list[float]  # one per step
    first_step: float  # seconds, compilation included
    other_steps: float  # seconds, all together

    @property
    def tokens_per_second(self) -> float:
        return BATCH * CONFIG.seq * (len(self.losses) - 1) / self.other_steps


def main() -> None:
    arguments = parse_arguments()
    if arguments.single:
        return train_single(arguments)
    if "RANK" not in os.environ:
        return launch(arguments)
    dist.init_process_group("gloo")
    try:
        train_sharded(arguments)
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mesh", type=parse_pairs, default="dp=2,tp=2", help="axes and their sizes")
    parser.add_argument("--recipe", type=parse_pairs, default="dp=fsdp,tp=megatron", help="a recipe per axis")
    parser.add_argument("--compile", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--sample", type=int, default=150, help="tokens that the trained model writes")
    parser.add_argument("--single", action="store_true", help="train on one device only")
    return parser.parse_args()


def parse_pairs(text: str) -> dict[str, str]:
    """Return `"dp=2,tp=2"` as a dict."""
    return dict(pair.split("=") for pair in text.split(","))


def launch(arguments: argparse.Namespace) -> None:
    """Run this file again, once per device of the mesh."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = torch.tensor([int(size) for size in arguments.mesh.values()])
    torchrun.main(["--standalone", f"--nproc-per-node={sizes.prod()}", *sys.argv])


def train_single(arguments: argparse.Namespace) -> None:
    console, corpus = Console(), make_corpus()
    model = make_model()
    history = train(compiled(model, arguments), corpus.step, "one device", arguments.steps, console)
    print_histories([history], corpus, console)
    prompt = corpus.prompt()
    print_sample(corpus.decode(prompt), corpus.decode(write(model, prompt, arguments.sample)), console)


def train_sharded(arguments: argparse.Namespace) -> None:
    # The norm that gradients are clipped to is reduced over two axes, one by one, and DTensor warns of it.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    is_first = dist.get_rank() == 0
    console, corpus = Console(quiet=not is_first), make_corpus()
    sizes = tuple(int(size) for size in arguments.mesh.values())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(arguments.mesh))
    options = Options(recipe=arguments.recipe, compile=arguments.compile)

    started = time.perf_counter()
    with console.status("planning and compiling"):
        model = autoshard(make_model(), mesh, args=corpus.step(0), options=options)
    console.print(Text(str(model.plan)))
    console.print(f"planned and compiled in {time.perf_counter() - started:.1f} s")
    name = " x ".join(f"{recipe} ({axis}={arguments.mesh[axis]})" for axis, recipe in arguments.recipe.items())
    sharded = train(model, lambda step: model.shard(*corpus.step(step)), name, arguments.steps, console)
    prompt = corpus.prompt()
    written = write(lambda tokens: model(*model.shard(tokens)), prompt, arguments.sample)

    if is_first:
        alone = train(compiled(make_model(), arguments), corpus.step, "one device", arguments.steps, console)
        print_histories([sharded, alone], corpus, console)
        print_sample(corpus.decode(prompt), corpus.decode(written), console)
    dist.barrier()


def make_corpus() -> Corpus:
    return Corpus(vocab=CONFIG.vocab, seq=CONFIG.seq, batch=BATCH)


def make_model() -> GPT:
    """Return the model with the same weights in every run and on every rank."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def compiled(model: nn.Module, arguments: argparse.Namespace) -> nn.Module:
    if arguments.compile == "eager":
        return model
    made = torch.compile(model)
    assert isinstance(made, nn.Module)
    return made


def train(
    model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]], name: str, steps: int, console: Console
) -> History:
    """Train for `steps`; `batch` returns what this process feeds the model. Nothing here knows about a mesh either."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP) * (1 - 0.9 * step / steps)
    )
    losses: list[float] = []
    times = [time.perf_counter()]
    with make_progress(console) as progress:
        task = progress.add_task(name, total=steps, loss="", speed="")
        for step in range(steps):
            loss = model(*batch(step))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            times.append(time.perf_counter())
            speed = BATCH * CONFIG.seq / (times[-1] - times[-2])
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}", speed=f"{speed:,.0f} tokens/s")
    return History(name, losses, times[1] - times[0], times[-1] - times[1])


@torch.no_grad()
def write(model: Callable[[Tensor], Tensor], prompt: Tensor, count: int) -> Tensor:
    """Return `count` tokens that follow `prompt` [seq], from a sliding window. The batch of one row is whole on every rank,
    and all choose the same tokens, with the same seed."""
    seeded = torch.Generator().manual_seed(0)
    text = prompt
    for _ in range(count):
        logits = model(text[None, -CONFIG.seq :])
        text = torch.cat((text, torch.multinomial(torch.softmax(logits[0] / TEMPERATURE, 0), 1, generator=seeded)))
    return text[len(prompt) :]


def make_progress(console: Console) -> Progress:
    text = "[progress.description]{task.description}"
    fields = (TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[speed]}"))
    return Progress(TextColumn(text), BarColumn(), MofNCompleteColumn(), *fields, TimeElapsedColumn(), console=console)


def print_histories(histories: list[History], corpus: Corpus, console: Console) -> None:
    """Print the loss at some steps, the speed and, for two runs, the largest difference of their losses."""
    steps = len(histories[0].losses)
    table = Table("step", *(history.name for history in histories), title="loss")
    shown = sorted({0, 1, 2, 4, 9, 24, 49, *range(99, steps, 50), steps - 1})
    differences = [max(losses) / min(losses) - 1 for losses in zip(*(h.losses for h in histories), strict=True)]
    if len(histories) > 1:
        table.add_column("relative difference")
    for step in (step for step in shown if step < steps):
        cells = [f"{history.losses[step]:.6f}" for history in histories]
        table.add_row(str(step + 1), *cells, *([f"{differences[step]:.1e}"] if len(histories) > 1 else []))
    console.print(table)
    if len(histories) > 1:
        console.print(f"largest relative difference of the loss over all {steps} steps: {max(differences):.1e}")
    for history in histories:
        console.print(
            f"{history.name}: {history.losses[-1] / corpus.bytes_per_token:.2f} nats per byte, "
            f"{history.tokens_per_second:,.0f} tokens/s, first step {history.first_step:.1f} s"
        )


def print_sample(prompt: str, written: str, console: Console) -> None:
    console.print(Panel(Text.assemble((prompt, "dim"), (written, "bold")), title="what the model writes"))


if __name__ == "__main__":
    main()
