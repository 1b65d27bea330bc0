"""Runs whose speed was published, each as it was run, and the stacks that they ran on.

A row is one run: its model, parallelism, batch, sequence, recomputation, precision and chip. The cost model was held against
`ROWS` while it was made. `held_out_runs` has runs that were looked up afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options
from benchmarks.published_models import megatron, titan
from examples import gpt, llama
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.layout import R
from passes.recipes import Decision, Decisions, Recipe, Site, recipe_named

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
    hides_backward: bool = False  # in the backward, their messages run beside the gradients of weights
    keeps_cast: bool = False  # parameters are kept in the dtype of products: a step casts none of them
    runs_to_end: bool = False  # recomputation runs a layer to its end: a checkpoint that is not compiled
    # Bytes that it reads and writes beyond what autoshard's program does:
    copied: int = 0  # per parameter that a rank computes with, to join parameters or gradients in messages
    updated: int = 0  # per parameter that a rank updates
    scored: int = 0  # per logit, for the loss
    unfused: tuple[int, int] = 0, 0  # per layer and element of a token: of the residual stream, of the feed-forward inside


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


WITHOUT_SEQUENCE = Recipe(MEGATRON_2019, "megatron without sequence parallelism", decide=_whole_stream)

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


def llama_of(config: llama.Config, seq: int) -> Build:
    return lambda batch: titan(config, batch, seq)


def tokens_per_device(seq: int) -> Callable[[Row, float], float]:
    return lambda row, seconds: row.micro_batches * row.batch * seq / Mesh(row.mesh).size / seconds


def gpt_of(config: gpt.Config) -> Build:
    return lambda batch: megatron(config, batch)


def _gpt_rate(config: gpt.Config) -> Callable[[Row, float], float]:
    """Return TFLOP/s per device by the paper's count, which has recomputation in it."""
    h, s, layers, vocab = config.dim, config.seq, config.layers, config.vocab
    sequence = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return lambda row, seconds: row.micro_batches * row.batch * sequence / Mesh(row.mesh).size / seconds / 1e12


def llama_row(
    name: str, kind: str, published: float, config: llama.Config, mesh: str, batch: int, stack: Stack, *, seq: int = 8192
) -> Row:
    return Row(name, kind, published, "tokens/s", llama_of(config, seq), mesh, batch, stack, tokens_per_device(seq))


def _gpt_row(name: str, kind: str, published: float, config: gpt.Config, mesh: str, batch: int, micro: int = 1) -> Row:
    alone = replace(MEGATRON, options=replace(MEGATRON.options, recipe="ddp"), scored=MEGATRON_LOSS - COMPILED_LOSS)
    stack = MEGATRON if TP in mesh else alone
    return Row(name, kind, published, "TFLOP/s", gpt_of(config), mesh, batch, stack, _gpt_rate(config), micro)


def _pipeline_row(
    name: str, published: float, config: gpt.Config, mesh: str, batch: int, micro: int, stages: int, chunks: int = 1
) -> Row:
    """Return a run with its own DDP (--DDP-impl local), which reduces gradients after the backward."""
    stage, rate = gpt_of(replace(config, layers=config.layers // stages)), _gpt_rate(config)
    stack = replace(MEGATRON, awaits=(DP, TP))
    return Row(
        name, PIPELINE, published, "TFLOP/s", stage, mesh, batch, stack,
        lambda row, seconds: rate(row, seconds) / stages, micro, stages, chunks,
    )  # fmt: skip


def gpt_config(layers: int, dim: int, heads: int) -> gpt.Config:
    return gpt.Config(layers=layers, dim=dim, heads=heads, vocab=51200, seq=2048)


FSDP, TENSOR, ASYNC, PIPELINE = "fsdp", "fsdp + tp", "fsdp + async tp", "ddp + tp + pp"
FULL = titan_stack("fsdp+megatron", block=True)
ROWS = (
    llama_row("Llama 3 8B, 8 GPUs, FSDP", FSDP, 6667, llama.LLAMA3_8B, "dp=8", 16, titan_stack("fsdp")),
    llama_row("Llama 3 8B, 128 GPUs, FSDP", FSDP, 6514, llama.LLAMA3_8B, "dp=128", 256, titan_stack("fsdp")),
    llama_row("Llama 3 70B, 256 GPUs, TP", TENSOR, 597.3, llama.LLAMA3_70B, "dp=32,tp=8", 512, FULL),
    llama_row(
        "Llama 3 70B, 256 GPUs, async TP", ASYNC, 652.4, llama.LLAMA3_70B, "dp=32,tp=8", 512, replace(FULL, pipelines=True)
    ),
    llama_row("Llama 3 8B, 64 GPUs, TP", TENSOR, 4378, llama.LLAMA3_8B, "dp=8,tp=8", 96, titan_stack("fsdp+megatron")),
    llama_row(
        "Llama 3 8B, 64 GPUs, async TP", ASYNC, 4809, llama.LLAMA3_8B, "dp=8,tp=8", 96,
        titan_stack("fsdp+megatron", pipelines=True),
    ),
    _gpt_row("GPT 1.7B, 32 GPUs, DP", "ddp", 137, gpt_config(24, 2304, 24), "dp=32", 512),
    _gpt_row("GPT 3.6B, 64 GPUs, TP", "ddp + tp", 138, gpt_config(30, 3072, 32), "dp=32,tp=2", 512),
    _gpt_row("GPT 7.5B, 128 GPUs, TP", "ddp + tp", 142, gpt_config(36, 4096, 32), "dp=32,tp=4", 512),
    _gpt_row("GPT 18.4B, 256 GPUs, TP", "ddp + tp", 135, gpt_config(40, 6144, 48), "dp=32,tp=8", 256, 4),
    _pipeline_row("GPT 39.1B, 512 GPUs, PP", 138, gpt_config(48, 8192, 64), "dp=32,tp=8", 128, 12, 2),
    _pipeline_row("GPT 76.1B, 1024 GPUs, PP", 140, gpt_config(60, 10240, 80), "dp=32,tp=8", 64, 28, 4, 3),
    _pipeline_row("GPT 145.6B, 1536 GPUs, PP", 148, gpt_config(80, 12288, 96), "dp=24,tp=8", 48, 48, 8, 2),
    _pipeline_row("GPT 310.1B, 1920 GPUs, PP", 155, gpt_config(96, 16384, 128), "dp=15,tp=8", 15, 144, 16, 2),
    _pipeline_row("GPT 529.6B, 2520 GPUs, PP", 163, gpt_config(105, 20480, 128), "dp=9,tp=8", 9, 280, 35, 3),
    _pipeline_row("GPT 1008B, 3072 GPUs, PP", 163, gpt_config(128, 25600, 160), "dp=6,tp=8", 6, 512, 64),
)  # fmt: skip
