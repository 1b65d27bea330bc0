"""Predict runs whose speed was published, as each was run: `python -m benchmarks.published`.

A row is one run: its model, parallelism, batch, sequence, recomputation, precision and chip. The table has the published
speed, the predicted one and their ratio, by kind of parallelism; `--json FILE` writes the rows. No figure of the cost
model is fitted to a row. Where a stack did not hide what autoshard would, the row is predicted without: its
tensor-parallel messages are awaited where they are sent. Nothing runs on devices. Words predict the rows alone whose names
have all of them: `python -m benchmarks.published 8B FSDP`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule

from autoshard import Mesh, Options
from autoshard.config.axis_recipes import recipes_of
from autoshard.planner.chunking import layered
from autoshard.planner.effort import QUICK
from autoshard.planner.evaluation import Folded, fold, phases_of
from autoshard.planner.prediction import run_step
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.recomputation import Settling, Trial, program_of_split
from autoshard.planner.request import PlanRequest
from benchmarks.published_models import megatron, titan
from examples import gpt, llama
from passes.base import PassContext
from passes.cost.collective_time import collective_seconds
from passes.cost.program import COMPUTE, Program, Task
from passes.cost.simulate import Timeline
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.graph import copy_graph
from passes.ir.layout import R
from passes.ir.matmul_chunks.one_operator import make_one, why_not_one
from passes.ir.matmul_chunks.sites import sites_in
from passes.manager import PassManager
from passes.recipes import Decision, Decisions, Recipe, Site, recipe_named, register_recipe

DP, TP = "dp", "tp"  # the axes of data and of tensor parallelism
MEGATRON_2019 = "megatron_2019"  # tensor parallelism without sequence parallelism

Build = Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]  # of a batch, to a model and its arguments


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The ways in which a published stack runs a step differently from autoshard."""

    options: Options
    hardware: Hardware
    source: str
    selective: tuple[str, ...] = ()  # kinds of values that its selective recomputation keeps; else as the options say
    pipelines: bool = False  # async tensor parallelism: one operator wherever torch has one
    awaits: tuple[str, ...] = (TP,)  # axes whose messages are awaited where they are sent
    keeps_cast: bool = False  # parameters are kept in the dtype of products: a step casts none of them
    runs_to_end: bool = False  # recomputation runs a layer to its end: a checkpoint that is not compiled
    # Bytes that it reads and writes beyond what autoshard's program does:
    copied: int = 0  # per parameter that a rank computes with, to join parameters or gradients in messages
    updated: int = 0  # per parameter that a rank updates
    scored: int = 0  # per logit, for the loss


@dataclass(frozen=True)
class Row:
    """A published run. `batch` is that of one micro-batch on all ranks, of which a step has `micro_batches`.

    Of a pipeline, model and mesh are those of its last stage; a rank has `chunks` of its layers, apart from each other.
    """

    name: str
    kind: str
    published: float
    unit: str
    model: Build = field(repr=False)
    mesh: str
    batch: int
    stack: Stack = field(repr=False)
    speed: Callable[[Row, float], float] = field(repr=False)  # of a step of so many seconds, in `unit`
    micro_batches: int = 1
    stages: int = 1
    chunks: int = 1


# Stacks ------------------------------------------------------------------------------------------------------------------


def _whole_stream(site: Site) -> Decisions:
    found = recipe_named("megatron").decide(site)
    values = {node: Decision(R, f"{MEGATRON_2019}: whole") for node in found.values}
    return replace(found, values=values)


_WITHOUT_SEQUENCE = Recipe(MEGATRON_2019, "megatron without sequence parallelism", decide=_whole_stream)

# torchtitan: activation checkpointing "op" keeps the results of attention, of reduce-scatters and of every second product
# of a layer, in the order wq, wk, wv, wo, w1, w3, w2.
SELECTIVE = (
    "attention.wq mm",
    "attention.wv mm",
    "feed_forward.w1 mm",
    "feed_forward.w2 mm",
    "attention _scaled_dot_product",
    "reduce_scatter",
)
BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float16)
ANY = "10TB"  # of memory: a row fitted when it was run
# FSDP2 gathers a block in one message, and copies its bf16 parameters out of it, in the forward and in the backward:
# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
FSDP_COPIES = 2 * (2 + 2)
# What the program counts already: one pass of AdamW over gradient, parameter and two moments; a compiled loss that reads
# logits three times and writes their gradient once, and of a split vocabulary reads them four times and keeps their exp.
FUSED_UPDATE, COMPILED_LOSS, COMPILED_SPLIT_LOSS = 7 * 4, 2 + 2 + 2 + 2, 2 + 2 + 2 + 6 + 6
# torchtitan clips gradients (a norm, a product), and in 2024 updated with foreach kernels, one pass each: two products, a lerp,
# addcmul, sqrt, a quotient, a sum, addcdiv (torch/optim/adam.py).
CLIP = 4 + 8
FOREACH = 8 + 8 + 12 + 12 + 8 + 8 + 8 + 16 - FUSED_UPDATE
# Its loss was eager in December 2024 (pull request 755): a conversion to float32; log_softmax, which reads rows three times and
# writes them; the gradient of nll, written; that of log_softmax, which reads one operand twice; a conversion.
EAGER_LOSS = 6 + 16 + 4 + 16 + 6 - COMPILED_LOSS
# Megatron-LM of 2021: the buckets of DDP, copied into and out of (--DDP-impl torch in run_table_1.sh); gradients unscaled and
# clipped in float32 (megatron/optimizer/optimizer.py); a loss of eight kernels over logits (megatron/mpu/cross_entropy.py): a
# conversion, max, a difference, exp, sum, a quotient, in the backward a product and a conversion. Parameters are multiplied in
# float16, and written to from those in float32 once a step.
DDP_COPIES = 2 * (2 + 2)
UNSCALE, TO_HALF = 8, 4 + 2
MEGATRON_LOSS = 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6


def titan_stack(recipe: str, *, block: bool = False, pipelines: bool = False) -> Stack:
    """Return the stack of torchtitan: of December 2024, and with tensor parallelism of June 2025."""
    recompute = "block" if block else "auto"
    is_older = "megatron" not in recipe
    return Stack(
        options=Options(recipe=recipe, mixed_precision=BF16, recompute=recompute, memory_limit=ANY),
        hardware=hardware_named("h100-500w"),
        source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md",
        selective=() if block else SELECTIVE,
        pipelines=pipelines,
        copied=FSDP_COPIES,
        updated=CLIP + (FOREACH if is_older else 0),
        scored=EAGER_LOSS if is_older else 0,
    )


MEGATRON = Stack(
    options=Options(recipe=f"ddp+{MEGATRON_2019}", mixed_precision=FP16, recompute="block", memory_limit=ANY),
    hardware=hardware_named("a100"),
    source="Narayanan et al. 2021, arXiv 2104.04473, table 1; examples/sc21/run_table_1.sh of NVIDIA/Megatron-LM",
    keeps_cast=True,
    runs_to_end=True,  # CheckpointFunction in megatron/mpu/random.py calls the layer again
    copied=DDP_COPIES,
    updated=UNSCALE + CLIP + TO_HALF,
    scored=MEGATRON_LOSS - COMPILED_SPLIT_LOSS,
)


# Rows --------------------------------------------------------------------------------------------------------------------


def _llama(config: llama.Config, seq: int) -> Build:
    return lambda batch: titan(config, batch, seq)


def _tokens_per_device(seq: int) -> Callable[[Row, float], float]:
    return lambda row, seconds: row.micro_batches * row.batch * seq / Mesh(row.mesh).size / seconds


def _gpt(config: gpt.Config) -> Build:
    return lambda batch: megatron(config, batch)


def _gpt_rate(config: gpt.Config) -> Callable[[Row, float], float]:
    """Return TFLOP/s per device by the paper's count, which has recomputation in it."""
    h, s, layers, vocab = config.dim, config.seq, config.layers, config.vocab
    sequence = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return lambda row, seconds: row.micro_batches * row.batch * sequence / Mesh(row.mesh).size / seconds / 1e12


def _llama_row(
    name: str, kind: str, published: float, config: llama.Config, mesh: str, batch: int, stack: Stack, *, seq: int = 8192
) -> Row:
    return Row(name, kind, published, "tokens/s", _llama(config, seq), mesh, batch, stack, _tokens_per_device(seq))


def _gpt_row(name: str, kind: str, published: float, config: gpt.Config, mesh: str, batch: int, micro: int = 1) -> Row:
    alone = replace(MEGATRON, options=replace(MEGATRON.options, recipe="ddp"), scored=MEGATRON_LOSS - COMPILED_LOSS)
    stack = MEGATRON if TP in mesh else alone
    return Row(name, kind, published, "TFLOP/s", _gpt(config), mesh, batch, stack, _gpt_rate(config), micro)


def _pipeline_row(
    name: str, published: float, config: gpt.Config, mesh: str, batch: int, micro: int, stages: int, chunks: int = 1
) -> Row:
    """Return a run with its own DDP (--DDP-impl local), which reduces gradients after the backward."""
    stage, rate = _gpt(replace(config, layers=config.layers // stages)), _gpt_rate(config)
    stack = replace(MEGATRON, awaits=(DP, TP))
    return Row(
        name, PIPELINE, published, "TFLOP/s", stage, mesh, batch, stack,
        lambda row, seconds: rate(row, seconds) / stages, micro, stages, chunks,
    )  # fmt: skip


def _gpt_config(layers: int, dim: int, heads: int) -> gpt.Config:
    return gpt.Config(layers=layers, dim=dim, heads=heads, vocab=51200, seq=2048)


FSDP, TENSOR, ASYNC, PIPELINE = "fsdp", "fsdp + tp", "fsdp + async tp", "ddp + tp + pp"
FULL = titan_stack("fsdp+megatron", block=True)
ROWS = (
    _llama_row("Llama 3 8B, 8 GPUs, FSDP", FSDP, 6667, llama.LLAMA3_8B, "dp=8", 16, titan_stack("fsdp")),
    _llama_row("Llama 3 8B, 128 GPUs, FSDP", FSDP, 6514, llama.LLAMA3_8B, "dp=128", 256, titan_stack("fsdp")),
    _llama_row("Llama 3 70B, 256 GPUs, TP", TENSOR, 597.3, llama.LLAMA3_70B, "dp=32,tp=8", 512, FULL),
    _llama_row(
        "Llama 3 70B, 256 GPUs, async TP", ASYNC, 652.4, llama.LLAMA3_70B, "dp=32,tp=8", 512, replace(FULL, pipelines=True)
    ),
    _llama_row("Llama 3 8B, 64 GPUs, TP", TENSOR, 4378, llama.LLAMA3_8B, "dp=8,tp=8", 96, titan_stack("fsdp+megatron")),
    _llama_row(
        "Llama 3 8B, 64 GPUs, async TP", ASYNC, 4809, llama.LLAMA3_8B, "dp=8,tp=8", 96,
        titan_stack("fsdp+megatron", pipelines=True),
    ),
    _gpt_row("GPT 1.7B, 32 GPUs, DP", "ddp", 137, _gpt_config(24, 2304, 24), "dp=32", 512),
    _gpt_row("GPT 3.6B, 64 GPUs, TP", "ddp + tp", 138, _gpt_config(30, 3072, 32), "dp=32,tp=2", 512),
    _gpt_row("GPT 7.5B, 128 GPUs, TP", "ddp + tp", 142, _gpt_config(36, 4096, 32), "dp=32,tp=4", 512),
    _gpt_row("GPT 18.4B, 256 GPUs, TP", "ddp + tp", 135, _gpt_config(40, 6144, 48), "dp=32,tp=8", 256, 4),
    _pipeline_row("GPT 39.1B, 512 GPUs, PP", 138, _gpt_config(48, 8192, 64), "dp=32,tp=8", 128, 12, 2),
    _pipeline_row("GPT 76.1B, 1024 GPUs, PP", 140, _gpt_config(60, 10240, 80), "dp=32,tp=8", 64, 28, 4, 3),
    _pipeline_row("GPT 145.6B, 1536 GPUs, PP", 148, _gpt_config(80, 12288, 96), "dp=24,tp=8", 48, 48, 8, 2),
    _pipeline_row("GPT 310.1B, 1920 GPUs, PP", 155, _gpt_config(96, 16384, 128), "dp=15,tp=8", 15, 144, 16, 2),
    _pipeline_row("GPT 529.6B, 2520 GPUs, PP", 163, _gpt_config(105, 20480, 128), "dp=9,tp=8", 9, 280, 35, 3),
    _pipeline_row("GPT 1008B, 3072 GPUs, PP", 163, _gpt_config(128, 25600, 160), "dp=6,tp=8", 6, 512, 64),
)  # fmt: skip


# Prediction --------------------------------------------------------------------------------------------------------------


def predict(row: Row) -> float:
    """Return the seconds of a step as it was run: those of the last micro-batch, which is reduced and applied, of the
    others, and of the stages of a pipeline.

    A stage waits for as many micro-batches as there are other stages, each of a part of its layers (Narayanan et al. 2021,
    section 2.2).
    """
    register_recipe(_WITHOUT_SEQUENCE)
    seconds = step(row.model, row.mesh, row.batch, row.stack).step_time + seconds_beside(row)
    others = row.micro_batches - 1 + (row.stages - 1) / row.chunks
    if not others:
        return seconds
    inner = ",".join(axis for axis in row.mesh.split(",") if axis.startswith(TP))
    ranks = Mesh(row.mesh).size // Mesh(inner).size
    options = replace(row.stack.options, recipe=MEGATRON_2019, optimizer=None)
    alone = step(row.model, inner, row.batch // ranks, replace(row.stack, options=options))
    return seconds + others * alone.step_time + _seconds_between_stages(row)


def _seconds_between_stages(row: Row) -> float:
    """Return the seconds in which a stage of Megatron-LM sends and receives, while it computes nothing.

    After each chunk of a micro-batch a rank sends its part of the activations over the network while it receives another,
    and its node gathers the parts (section 4.1 of the paper); as it does with the gradients.
    """
    if row.stages == 1:
        return 0.0
    mesh, machine = Mesh(row.mesh), row.stack.hardware
    with torch.device("meta"):
        model, (tokens, *_) = row.model(row.batch)
    config: Any = model.config
    parts = mesh.sizes[mesh.index(TP)]
    nbytes = 2 * tokens.numel() // (mesh.size // parts) * int(config.dim)
    sent = machine.across.setup + machine.across.latency + nbytes / parts / machine.across.bandwidth
    one = sent + collective_seconds("all_gather", nbytes, mesh.group_shape((TP,)), machine)
    return 2 * (row.micro_batches * row.chunks + row.stages - 1) * one


def seconds_beside(row: Row) -> float:
    """Return the seconds of what the stack reads and writes beyond the program: once a step, but for logits."""
    with torch.device("meta"):
        model, (tokens, *_) = row.model(row.batch)
    mesh, stack = Mesh(row.mesh), row.stack
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = mesh.sizes[mesh.index(TP)] if TP in mesh.names else 1
    owners = mesh.size if "fsdp" in str(stack.options.recipe) else parts
    config: Any = model.config
    logits = row.micro_batches * tokens.numel() * int(config.vocab) / mesh.size
    moved = stack.copied * count / parts + stack.updated * count / owners + stack.scored * logits
    return moved / stack.hardware.memory_bandwidth


def step(build: Build, mesh: str, batch: int, stack: Stack) -> Timeline:
    """Return the step of one micro-batch, with the orders and buckets that autoshard would choose."""
    with torch.device("meta"):
        model, args = build(batch)
    request = PlanRequest(model, args, {}, Mesh(mesh, hardware=stack.hardware), stack.options).checked()
    problem = captured_problem(request)
    folded = fold(problem)
    trial = _trial(problem, folded, stack)
    program = _pipelined(problem, folded, trial) if stack.pipelines else trial.program
    if stack.keeps_cast:
        program = _without_casts(program)
    if stack.runs_to_end:
        program = _run_to_end(program)
    return run_step(_awaited(program, stack.awaits), stack.options)


def _trial(problem: Problem, folded: Folded, stack: Stack) -> Trial:
    gm, ctx = copy_graph(folded.graph), PassContext(problem.mesh)
    phases = phases_of(problem, gm, recipes_of(stack.options.recipe, problem.mesh))
    PassManager((*phases.place, *phases.lower)).run(gm, ctx)
    settling = Settling(problem, folded.repeats, gm, effort=QUICK)  # its order is not used
    if not stack.selective:
        return settling.settle()
    kinds = dict.fromkeys(settling.blocks.kind.values())
    return settling.trial(tuple(kind for kind in kinds if any(name in kind for name in stack.selective)))


def _pipelined(problem: Problem, folded: Folded, trial: Trial) -> Program:
    """Return the program with one of torch's operators wherever there is one."""
    split = trial.split
    assert split.backward is not None
    halves = [_fused(layered(half, split.forward, folded.repeats)) for half in (split.forward, split.backward)]
    return program_of_split(replace(split, forward=halves[0], backward=halves[1]), problem, folded.repeats)


def _fused(gm: GraphModule) -> GraphModule:
    for site in sites_in(gm):
        if not why_not_one(site):
            make_one(site, "published")
    return gm


def _without_casts(program: Program) -> Program:
    """Return the program with casts of parameters that take no time."""
    return replace(program, tasks=tuple(replace(t, seconds=0.0) if _reads_weights(t) else t for t in program.tasks))


def _reads_weights(task: Task) -> bool:
    """Return whether a kernel of the forward reads parameters alone."""
    return not (task.backward or task.is_sending) and all(name.startswith("parameter.") for name in task.inputs)


def _run_to_end(program: Program) -> Program:
    """Return the program with what the recomputation of a layer leaves out, as nothing reads it, run again as well."""
    again = {(_layer(task), node) for task in program.tasks if task.backward for node in task.nodes}
    left, tasks = defaultdict[str, list[Task]](list), list[Task]()
    for task in program.tasks:
        if not (task.backward or _reads_weights(task)) and (_layer(task), task.nodes[-1]) not in again:
            left[_layer(task)].append(replace(task, name=f"again.{task.name}", inputs=(), outputs=(), backward=True))
    for task in program.tasks:
        if task.backward and (layer := _layer(task)):
            tasks += left.pop(layer, ())
        tasks.append(task)
    return replace(program, tasks=tuple(tasks))


def _layer(task: Task) -> str:
    """Return the layer that a task is of ("blocks.3"), or "" for none."""
    found = re.match(r"\w+\.\d+", task.fqn)
    return found[0] if found else ""


def _awaited(program: Program, axes: tuple[str, ...]) -> Program:
    """Return the program with the messages over each of `axes` awaited where they are sent: nothing runs beside."""
    return replace(program, tasks=tuple([_awaited_task(task) if _is_awaited(task, axes) else task for task in program.tasks]))


def _is_awaited(task: Task, axes: tuple[str, ...]) -> bool:
    return task.is_collective and len(task.axes) == 1 and task.axes[0] in axes


def _awaited_task(task: Task) -> Task:
    return replace(task, kind="compute", stream=COMPUTE, prefetchable=False, deferrable=False)


# Table -------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of rows; by default all rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    given = parser.parse_args()
    rows, found = [row for row in ROWS if all(word in row.name for word in given.words)], []
    for row in rows:
        predicted = row.speed(row, predict(row))
        ratio = predicted / row.published
        found.append({"name": row.name, "kind": row.kind, "published": row.published, "predicted": predicted, "ratio": ratio})
        print(f"{row.name:32} {row.kind:16} {row.published:7.1f} {row.unit:8} {predicted:8.1f}  {ratio:.3f}", flush=True)
    if found:
        _summarize(rows, found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def _summarize(rows: Sequence[Row], found: Sequence[dict[str, object]]) -> None:
    ratios = [float(str(row["ratio"])) for row in found]
    print(f"{len(ratios)} rows: {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}")
    for kind in dict.fromkeys(row["kind"] for row in found):
        own = [float(str(row["ratio"])) for row in found if row["kind"] == kind]
        print(f"  {kind:16} {statistics.median(own):.3f}")
    for machine in dict.fromkeys(row.stack.hardware for row in rows):
        print(f"{machine.name}: published figures, but for {', '.join(machine.assumed)}, which are assumed")


if __name__ == "__main__":
    main()
