"""Predict curves that were published of long sequences: `python -m benchmarks.context_curves`.

A curve is one model at growing lengths. What is compared are ratios: of the speed at a length to that at the length before,
and of the speed with context parallelism to the best without. The table has the published and the predicted ratio, and the
predicted as a part of the published. No figure of the cost model is fitted. The runs multiplied in float8: products run at
its rate here, and casts to it are not counted. `--runs` also prints the predicted speed of each run, of which the fastest counts.
Words choose the curves whose names have all of them:
`python -m benchmarks.context_curves Llama 8B`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options
from benchmarks.published import seconds_beside, step
from benchmarks.published_models import titan
from benchmarks.published_runs import Build, Row, Stack, titan_stack
from examples import llama
from passes.hardware.hardware import Hardware, hardware_named

K = 1024


@dataclass(frozen=True)
class Run:
    """A training step. `mesh` and `batch` are those of one pipeline stage and one micro-batch, on all its ranks."""

    model: Build
    mesh: str
    batch: int
    stack: Stack
    micro_batches: int = 1
    stages: int = 1

    def seconds(self) -> float | None:
        """Return the seconds of a step; None if it takes more memory than there is.

        Of a pipeline, a stage has its micro-batches one after another, and waits for as many as there are stages after it.
        """
        last = step(self.model, self.mesh, self.batch, self.stack)
        if last.peak_memory > self._memory():
            return None
        others = self.micro_batches + self.stages - 2
        row = Row("", "", 0.0, "", self.model, self.mesh, self.batch, self.stack, lambda _, seconds: seconds)
        return last.step_time + seconds_beside(row) + (others * self._added() if others else 0.0)

    def _memory(self) -> int:
        return self.stack.options.memory_bytes(self.stack.hardware.memory_bytes)

    def _added(self) -> float:
        """Return the seconds of a micro-batch whose gradients are only added up: the ranks of `dp` do not hear each other."""
        data, mesh = self.mesh.split(",", 1)
        recipe = str(self.stack.options.recipe).split("+", 1)[1]
        stack = replace(self.stack, options=replace(self.stack.options, recipe=recipe, optimizer=None))
        return step(self.model, mesh, self.batch // Mesh(data).size, stack).step_time


def in_float8(machine: Hardware) -> Hardware:
    """Return a machine that multiplies bfloat16 at the rate of float8, but in attention."""
    wide, narrow = machine.rate("bf16"), machine.rate("f8")
    flops = tuple((dtype, narrow if dtype == "bf16" else rate) for dtype, rate in machine.flops)
    return replace(machine, name=f"{machine.name}, float8", flops=flops, attention=machine.attention * wide / narrow)


@dataclass(frozen=True)
class Point:
    """A published speed, and the runs of which the fastest was published; `tokens` of a step, per device."""

    name: str
    published: float
    tokens: float
    runs: tuple[Run, ...]

    def speeds(self) -> list[float]:
        """Return the predicted tokens a second per device of each run, 0 of one that takes more memory than there is."""
        return [0.0 if seconds is None else self.tokens / seconds for seconds in (run.seconds() for run in self.runs)]


@dataclass(frozen=True)
class Curve:
    """Pairs of points, whose ratios are compared."""

    name: str
    source: str
    pairs: tuple[tuple[Point, Point], ...]


# torchtitan --------------------------------------------------------------------------------------------------------------

TITAN = "pytorch/torchtitan, docs/performance.md of 2024 (arXiv 2410.06511), H100 of 500 W, all recomputed"


def _titan_stack(recipe: str, *, pipelines: bool = False) -> Stack:
    stack = titan_stack(recipe, block=True, pipelines=pipelines)
    return replace(stack, hardware=in_float8(stack.hardware))


def _titan_8b() -> Curve:
    """Return the runs of 8B: a sequence for each rank of `dp`, parameters over all ranks, keys and values gathered."""

    def point(seq: int, speed: float, mesh: str, recipe: str) -> Point:
        batch = Mesh(mesh).sizes[0] if mesh.startswith("dp") else 1
        stack = _titan_stack(recipe)
        run = Run(lambda batch: titan(llama.LLAMA3_8B, batch, seq), mesh, batch, stack)
        return Point(f"{seq // K}K {mesh}", speed, batch * seq / 8, (run,))

    ways = "fsdp_context(gather)"
    points = (
        point(32 * K, 3890, "dp=8", "fsdp"),
        point(64 * K, 2540, "dp=4,cp=2", f"fsdp+{ways}"),
        point(128 * K, 1071, "dp=2,cp=4", f"fsdp+{ways}"),
        point(256 * K, 548, "cp=8", ways),
    )
    return Curve("Llama 3 8B, 8 GPUs", TITAN, tuple(zip(points[1:], points, strict=False)))


def _titan_405b() -> Curve:
    """Return those of 405B, as a stage of 16 of its 126 layers, whose parameters are gathered once for eight micro-batches."""
    stage = replace(llama.LLAMA3_405B, layers=16)

    def point(seq: int, speed: float, mesh: str, recipe: str) -> Point:
        batch = Mesh(mesh).sizes[0] if mesh.startswith("dp") else 1
        stack = _titan_stack(recipe, pipelines=True)
        run = Run(lambda batch: titan(stage, batch, seq), mesh, batch, stack, micro_batches=8, stages=8)
        return Point(f"{seq // K}K {mesh}", speed, 8 * batch * seq / 512, (run,))

    points = (
        point(32 * K, 76, "dp=8,tp=8", "zero2+megatron"),
        point(64 * K, 47, "dp=4,cp=2,tp=8", "zero2+context(gather)+megatron"),
        point(128 * K, 31, "dp=2,cp=4,tp=8", "zero2+context(gather)+megatron"),
        point(256 * K, 16, "dp=1,cp=8,tp=8", "zero2+context(gather)+megatron"),
    )
    return Curve("Llama 3 405B, 512 GPUs", TITAN, tuple(zip(points[1:], points, strict=False)))


# NeMo --------------------------------------------------------------------------------------------------------------------

LLAMA2_7B = llama.Config(layers=32, dim=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000)
TOKENS = 4096 * K  # of a step, at each length
BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
NEMO = "NVIDIA/NeMo 24.03, docs/source/performance/performance_long_sequence.md, DGX H100"
NODE, WIDEST = 8, 32  # ranks of tensor parallelism: those of a node, and one for each head


def _nemo_runs(recipe: str, run: Callable[[Stack], Run]) -> Iterator[Run]:
    """Yield a run that keeps all that its backward needs, and one that recomputes each layer."""
    for recompute in ("none", "block"):
        options = Options(recipe=recipe, mixed_precision=BF16, recompute=recompute)
        yield run(Stack(options=options, hardware=in_float8(hardware_named("h100")), source=NEMO, awaits=()))


def _layers(seq: int, stages: int) -> Build:
    config = replace(LLAMA2_7B, layers=LLAMA2_7B.layers // stages)

    def build(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return llama.step_of(config, batch, seq)

    return build


def _nemo(length: int, without: float, tp: int, dp: int, cp: int, speed: float) -> tuple[Point, Point]:
    """Return the run with context parallelism and those without; GPUs are as many as there are K positions."""
    seq, batch = length * K, TOKENS // (length * K)
    axes, recipe = f"dp={dp},cp={cp},tp={tp}", "zero2+context(ring)+megatron"
    runs = tuple(_nemo_runs(recipe, lambda stack: Run(_layers(seq, 1), axes, dp, stack, batch // dp)))
    most = min(tp * cp, WIDEST)
    widths = dict.fromkeys((NODE, *(width for width in (2 * NODE,) if width < most), most))
    others = tuple(run for parts in widths for run in _without(seq, length, batch, parts))
    each = TOKENS / length
    return Point(f"{length}K {axes}", speed, each, runs), Point(f"{length}K without", without, each, others)


def _without(seq: int, devices: int, batch: int, tp: int) -> Iterator[Run]:
    """Yield runs without context parallelism: pipeline stages take the devices for which there are no sequences."""
    dp = min(batch, devices // tp)
    stages = devices // (tp * dp)
    mesh, model = f"dp={dp},tp={tp}", _layers(seq, stages)
    yield from _nemo_runs("zero2+megatron", lambda stack: Run(model, mesh, dp, stack, batch // dp, stages))


def _llama2() -> Curve:
    pairs = (
        _nemo(32, 595, 2, 8, 2, 610),
        _nemo(64, 534, 4, 8, 2, 574),
        _nemo(128, 424, 4, 8, 4, 555),
        _nemo(256, 392, 4, 8, 8, 549),
        _nemo(512, 104, 8, 4, 16, 549),
        _nemo(1024, 26.5, 8, 4, 32, 536),
    )
    return Curve("Llama 2 7B, a GPU for each K", NEMO, pairs)


# Table -------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of curves; by default all curves")
    parser.add_argument("--runs", action="store_true", help="print the predicted speed of each run")
    given = parser.parse_args()
    for curve in (_titan_8b(), _titan_405b(), _llama2()):
        if all(word in curve.name for word in given.words):
            print(f"{curve.name} ({curve.source})")
            for line in _lines(curve, each=given.runs):
                print(line, flush=True)


def _lines(curve: Curve, *, each: bool) -> Iterator[str]:
    speeds = dict[Point, float]()
    for over, under in curve.pairs:
        for point in (under, over):
            if point not in speeds:
                found = point.speeds()
                speeds[point] = max(found)
                yield from (_line(run, speed) for run, speed in zip(point.runs, found, strict=True) if each)
        published, predicted = over.published / under.published, speeds[over] / speeds[under]
        names = f"{over.name} / {under.name}"
        yield f"  {names:42} {published:7.3f} {predicted:7.3f}  {predicted / published:.3f}"


def _line(run: Run, speed: float) -> str:
    kind = "recomputed" if run.stack.options.recompute == "block" else "kept"
    return f"    {run.mesh}, {run.stages} stages, {kind}: {f'{speed:.1f} tokens/s' if speed else 'takes too much memory'}"


if __name__ == "__main__":
    main()
