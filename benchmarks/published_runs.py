"""Runs whose speed was published, each as it was run, and the stacks that they ran on.

A row is one run: its model, parallelism, batch, sequence, recomputation, precision and chip. `ROWS` are the runs that the cost
model was held against while it was made. `HELD_OUT` are runs that were looked up afterwards: nothing was changed for them.
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


# Of an eager layer, forward and backward, beyond one that is compiled. A sum with the residual is a kernel apart from the norm
# that reads it; a gated feed-forward multiplies in another kernel than that of silu, in the backward in two others.
EAGER_SUM, EAGER_GATE = (2, 4), (4, 8)
# The norm of both stacks (torchtitan/models/norms.py, fms/modules/layernorm.py): a conversion to float32, a square, a mean, a
# product, a conversion, the weight; the gradients of each.
EAGER_NORM = (6 + 8 + 4 + 8 + 6 + 4 - 4, 12 + 6 + 24 + 16 + 12 + 6 - 10)


def unfused(recompute: str) -> tuple[int, int]:
    """Return the bytes of an eager layer beyond a compiled one: of a layer that is computed again, the forward counts twice."""
    times = 1 if recompute == "none" else 2
    forward, backward = (2 * (one + other) for one, other in zip(EAGER_SUM, EAGER_NORM, strict=True))  # a layer has two of each
    return times * forward + backward, times * EAGER_GATE[0] + EAGER_GATE[1]


def titan_a100_stack(recompute: str) -> Stack:
    """Return the stack of torchtitan in the summer of 2024, eager, on A100s with a network that is not named."""
    stack = titan_stack("fsdp", block=recompute == "block")
    return replace(
        stack,
        options=replace(stack.options, recompute=recompute),
        hardware=hardware_named("a100"),
        source="pytorch/torchtitan, docs/performance.md and train_configs/llama2_13b.toml of 2024",
        selective=SELECTIVE if recompute == "auto" else (),
        unfused=unfused(recompute),
    )


def fms_stack(hardware: str, gigabits: int, recipe: str, recompute: str = "none") -> Stack:
    """Return the stack of IBM's fms-fsdp in the spring of 2024, eager, on nodes with a network of so many Gbit/s.

    FSDP1 gathers flat parameters, which products read where they are.
    """
    preset = hardware_named(hardware)
    across = replace(preset.across, bandwidth=gigabits / 8 / preset.node_size * 1e9)
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    return Stack(
        options=Options(recipe=recipe, mixed_precision=half, recompute=recompute, memory_limit=ANY),
        hardware=replace(preset, name=f"{hardware}, {gigabits} Gbit/s a node", across=across),
        source="foundation-model-stack/fms-fsdp, README.md of 2024, fms_fsdp/policies/mixed_precision.py",
        updated=CLIP + FOREACH,
        scored=EAGER_LOSS,
        unfused=unfused(recompute),
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

# Llama 2, and the 34B of Code Llama.
LLAMA2_7B = llama.Config(layers=32, dim=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000)
LLAMA2_13B = llama.Config(layers=40, dim=5120, heads=40, kv_heads=40, hidden=13824, vocab=32000)
LLAMA2_34B = llama.Config(layers=48, dim=8192, heads=64, kv_heads=8, hidden=22016, vocab=32000)
LLAMA2_70B = replace(llama.LLAMA3_70B, vocab=32000)


def _held_out(
    name: str, published: float, config: llama.Config, mesh: str, batch: int, stack: Stack, *, seq: int = 4096
) -> Row:
    """Return a run of as many sequences per rank as `batch` says."""
    kind = f"{stack.options.recipe}, held out"
    return _llama_row(name, kind, published, config, mesh, batch * Mesh(mesh).size, stack, seq=seq)


TITAN_NONE, TITAN_SELECTIVE, TITAN_FULL = (titan_a100_stack(recompute) for recompute in ("none", "auto", "block"))
EAGER = replace(titan_stack("fsdp"), unfused=unfused("auto"), source="benchmarks/llama3_h100_202412_torchtitan.md, table 1")
HELD_OUT = (
    _held_out("Llama 3 8B, 8 H100, eager", 5762, llama.LLAMA3_8B, "dp=8", 2, EAGER, seq=8192),
    _held_out("Llama 3 8B, 64 A100", 2973, llama.LLAMA3_8B, "dp=64", 1, TITAN_SELECTIVE, seq=8192),
    _held_out("Llama 3 70B, 64 A100", 331, llama.LLAMA3_70B, "dp=64", 1, TITAN_FULL, seq=8192),
    _held_out("Llama 2 13B, 64 A100", 2162, LLAMA2_13B, "dp=64", 2, TITAN_NONE),
    _held_out("Llama 2 13B, 64 A100, selective", 1904, LLAMA2_13B, "dp=64", 2, TITAN_SELECTIVE),
    _held_out("Llama 2 70B, 64 A100, selective", 355, LLAMA2_70B, "dp=64", 1, TITAN_SELECTIVE),
    _held_out("Llama 2 70B, 64 A100", 353, LLAMA2_70B, "dp=64", 2, TITAN_FULL),
    _held_out("Llama 2 7B, 128 A100", 3760, LLAMA2_7B, "nodes=16,dp=8", 2, fms_stack("a100", 400, "hsdp")),
    _held_out("Llama 2 7B, 96 H100", 7500, LLAMA2_7B, "nodes=12,dp=8", 2, fms_stack("h100", 800, "hsdp")),
    _held_out("Llama 2 13B, 128 A100", 1700, LLAMA2_13B, "nodes=16,dp=8", 1, fms_stack("a100", 400, "hsdp")),
    _held_out("Llama 2 34B, 128 A100", 772, LLAMA2_34B, "dp=128", 8, fms_stack("a100", 400, "fsdp", "block")),
    _held_out("Llama 2 34B, 96 H100", 1550, LLAMA2_34B, "dp=96", 2, fms_stack("h100", 800, "fsdp", "block")),
    _held_out("Llama 2 70B, 128 A100", 380, LLAMA2_70B, "dp=128", 6, fms_stack("a100", 400, "fsdp", "block")),
)
