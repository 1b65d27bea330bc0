"""Published runs that the cost model was not held against while it was made: they were looked up afterwards, and nothing was
changed for them. `python -m benchmarks.published --held-out` predicts them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options
from benchmarks.published_runs import (
    ANY,
    BF16,
    CLIP,
    EAGER_LOSS,
    FOREACH,
    FSDP_COPIES,
    MEGATRON,
    MEGATRON_2019,
    SELECTIVE,
    Build,
    Row,
    Stack,
    gpt_config,
    gpt_of,
    llama_of,
    llama_row,
    titan_stack,
    tokens_per_device,
)
from examples import gpt, llama
from passes.hardware.hardware import Hardware, hardware_named

BF16_ALONE = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)

# Of an eager layer, forward and backward, beyond one that is compiled. A sum with the residual is a kernel apart from the norm
# that reads it; a gated feed-forward multiplies in another kernel than that of silu, in the backward in two others.
EAGER_SUM, EAGER_GATE = (2, 4), (4, 8)
# The norm of torchtitan and fms-fsdp (torchtitan/models/norms.py, fms/modules/layernorm.py): a conversion to float32, a square,
# a mean, a product, a conversion, the weight; the gradients of each.
EAGER_NORM = (6 + 8 + 4 + 8 + 6 + 4 - 4, 12 + 6 + 24 + 16 + 12 + 6 - 10)


def unfused(recompute: str, *, norm: tuple[int, int] = EAGER_NORM, gate: tuple[int, int] = EAGER_GATE) -> tuple[int, int]:
    """Return the bytes of an eager layer beyond a compiled one: of a layer that is computed again, the forward counts twice."""
    times = 1 if recompute == "none" else 2
    forward, backward = (2 * (one + other) for one, other in zip(EAGER_SUM, norm, strict=True))  # a layer has two of each
    return times * forward + backward, times * gate[0] + gate[1]


def networked(hardware: Hardware, gigabits: int) -> Hardware:
    """Return the hardware on nodes with a network of so many Gbit/s each."""
    across = replace(hardware.across, bandwidth=gigabits / 8 / hardware.node_size * 1e9)
    return replace(hardware, name=f"{hardware.name}, {gigabits} Gbit/s a node", across=across)


# Llama on torchtitan and fms-fsdp ----------------------------------------------------------------------------------------

# Llama 2, and the 34B of Code Llama.
LLAMA2_7B = llama.Config(layers=32, dim=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000)
LLAMA2_13B = llama.Config(layers=40, dim=5120, heads=40, kv_heads=40, hidden=13824, vocab=32000)
LLAMA2_34B = llama.Config(layers=48, dim=8192, heads=64, kv_heads=8, hidden=22016, vocab=32000)
LLAMA2_70B = replace(llama.LLAMA3_70B, vocab=32000)


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
    return Stack(
        options=Options(recipe=recipe, mixed_precision=BF16_ALONE, recompute=recompute, memory_limit=ANY),
        hardware=networked(hardware_named(hardware), gigabits),
        source="foundation-model-stack/fms-fsdp, README.md of 2024, fms_fsdp/policies/mixed_precision.py",
        updated=CLIP + FOREACH,
        scored=EAGER_LOSS,
        unfused=unfused(recompute),
    )


def _llama_row(
    name: str, published: float, config: llama.Config, mesh: str, batch: int, stack: Stack, *, seq: int = 4096
) -> Row:
    """Return a run of as many sequences per rank as `batch` says."""
    kind = f"{stack.options.recipe}, held out"
    return llama_row(name, kind, published, config, mesh, batch * Mesh(mesh).size, stack, seq=seq)


TITAN_NONE, TITAN_SELECTIVE, TITAN_FULL = (titan_a100_stack(recompute) for recompute in ("none", "auto", "block"))
EAGER = replace(titan_stack("fsdp"), unfused=unfused("auto"), source="benchmarks/llama3_h100_202412_torchtitan.md, table 1")
LLAMAS = (
    _llama_row("Llama 3 8B, 8 H100, eager", 5762, llama.LLAMA3_8B, "dp=8", 2, EAGER, seq=8192),
    _llama_row("Llama 3 8B, 64 A100", 2973, llama.LLAMA3_8B, "dp=64", 1, TITAN_SELECTIVE, seq=8192),
    _llama_row("Llama 3 70B, 64 A100", 331, llama.LLAMA3_70B, "dp=64", 1, TITAN_FULL, seq=8192),
    _llama_row("Llama 2 13B, 64 A100", 2162, LLAMA2_13B, "dp=64", 2, TITAN_NONE),
    _llama_row("Llama 2 13B, 64 A100, selective", 1904, LLAMA2_13B, "dp=64", 2, TITAN_SELECTIVE),
    _llama_row("Llama 2 70B, 64 A100, selective", 355, LLAMA2_70B, "dp=64", 1, TITAN_SELECTIVE),
    _llama_row("Llama 2 70B, 64 A100", 353, LLAMA2_70B, "dp=64", 2, TITAN_FULL),
    _llama_row("Llama 2 7B, 128 A100", 3760, LLAMA2_7B, "nodes=16,dp=8", 2, fms_stack("a100", 400, "hsdp")),
    _llama_row("Llama 2 7B, 96 H100", 7500, LLAMA2_7B, "nodes=12,dp=8", 2, fms_stack("h100", 800, "hsdp")),
    _llama_row("Llama 2 13B, 128 A100", 1700, LLAMA2_13B, "nodes=16,dp=8", 1, fms_stack("a100", 400, "hsdp")),
    _llama_row("Llama 2 34B, 128 A100", 772, LLAMA2_34B, "dp=128", 8, fms_stack("a100", 400, "fsdp", "block")),
    _llama_row("Llama 2 34B, 96 H100", 1550, LLAMA2_34B, "dp=96", 2, fms_stack("h100", 800, "fsdp", "block")),
    _llama_row("Llama 2 70B, 128 A100", 380, LLAMA2_70B, "dp=128", 6, fms_stack("a100", 400, "fsdp", "block")),
)

# Llama 3 on KempnerForge, compiled by a torch of 2026, on nodes of four H200: FSDP2, a fused AdamW, layers computed again.

KEMPNER = Stack(
    options=Options(recipe="fsdp", mixed_precision=BF16, recompute="block", memory_limit=ANY),
    hardware=replace(hardware_named("h200"), node_size=4),
    source="KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md",
    copied=FSDP_COPIES,
    updated=CLIP,
)


def _kempner_row(ranks: int, batch: int, micro_batches: int, published: float) -> Row:
    stack = KEMPNER
    if ranks == 1:
        stack = replace(KEMPNER, options=replace(KEMPNER.options, recipe="ddp"), copied=0)
    return Row(
        f"Llama 3 8B, {ranks} H200, compiled in 2026", "fsdp, held out", published / ranks, "tokens/s",
        llama_of(llama.LLAMA3_8B, 4096), f"dp={ranks}", batch * ranks, stack, tokens_per_device(4096), micro_batches,
    )  # fmt: skip


H200 = (_kempner_row(1, 2, 4, 10471), _kempner_row(2, 2, 4, 18728), _kempner_row(4, 4, 2, 38983))

# MPT on MosaicML's llm-foundry, eager, by torch 1.13 to 2.1 of 2023: FSDP1, a loss in one kernel, norms in bfloat16 in one kernel
# each, no gate. Of its mixed precision, PURE reduces gradients in bfloat16; DEFAULT, which its parts of 80 GB ran, in float32.
# Not counted is that its attention was FlashAttention in Triton, than which the presets' FlashAttention-2 is faster.

A100, H100 = hardware_named("a100"), hardware_named("h100")
# By the datasheets, the part of 40 GB has 1.555 TB/s and that of 80 GB, the preset's, 2.039.
A100_40GB = replace(A100, name="a100 of 40 GB", memory_bandwidth=A100.memory_bandwidth * 1.555 / 2.039)
MPT = {
    name: gpt.Config(layers=layers, dim=dim, heads=heads, vocab=50368, seq=2048)
    for name, layers, dim, heads in (
        ("760M", 24, 1536, 12), ("1B", 24, 2048, 16), ("3B", 32, 2560, 20), ("7B", 32, 4096, 32), ("13B", 40, 5120, 40),
        ("30B", 48, 7168, 56), ("70B", 80, 8192, 64),
    )
}  # fmt: skip


def foundry_stack(hardware: Hardware, recompute: str) -> Stack:
    """Return the stack of llm-foundry in 2023, on nodes with a network of 1600 Gbit/s (A100) or 3200 (H100)."""
    reduced = BF16_ALONE if hardware is A100_40GB else BF16
    gigabits = 3200 if hardware.name == "h100" else 1600
    return Stack(
        options=Options(recipe="fsdp", mixed_precision=reduced, recompute=recompute, memory_limit=ANY),
        hardware=networked(hardware, gigabits),
        source="mosaicml/llm-foundry, scripts/train/benchmarking/README.md; get_mixed_precision of mosaicml/composer",
        updated=CLIP + FOREACH,
        unfused=unfused(recompute, norm=(0, 0), gate=(0, 0)),
    )


def _mpt(config: gpt.Config, seq: int) -> Build:
    def build(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        return gpt.GPT(replace(config, seq=seq)), (tokens, tokens)

    return build


def _mpt_row(
    published: float, size: str, ranks: int, hardware: Hardware, batch: int, *, micro: int = 1, seq: int = 2048, again: bool
) -> Row:
    """Return a run of as many sequences per rank and micro-batch as `batch` says."""
    part, positions = f"{hardware.name[0].upper()}{hardware.name[1:]}", f", {seq} positions" if seq != 2048 else ""
    stack = foundry_stack(hardware, "block" if again else "none")
    return Row(
        f"MPT {size}, {ranks} {part}{positions}", f"fsdp, {hardware.name}, 2023", published, "tokens/s",
        _mpt(MPT[size], seq), f"dp={ranks}", batch * ranks, stack, tokens_per_device(seq), micro,
    )  # fmt: skip


MPTS = (
    _mpt_row(32434, "760M", 8, A100, 24, micro=2, again=False),
    _mpt_row(20513, "1B", 8, A100, 14, micro=4, again=False),
    _mpt_row(10811, "3B", 8, A100, 10, micro=2, again=False),
    _mpt_row(4641, "7B", 8, A100, 6, micro=2, again=False),
    _mpt_row(2262, "13B", 8, A100, 2, micro=3, again=False),
    _mpt_row(2060, "13B", 8, A100, 10, micro=3, seq=4096, again=True),
    _mpt_row(916, "30B", 8, A100, 3, micro=21, again=True),
    _mpt_row(3665, "7B", 64, A100_40GB, 18, again=True),
    _mpt_row(1993, "13B", 16, A100_40GB, 10, again=True),
    _mpt_row(1972, "13B", 128, A100_40GB, 16, again=True),
    _mpt_row(857, "30B", 32, A100_40GB, 4, again=True),
    _mpt_row(276, "70B", 64, A100_40GB, 2, again=True),
    _mpt_row(376, "70B", 128, A100_40GB, 4, again=True),
    _mpt_row(46037, "1B", 16, H100, 20, again=False),
    _mpt_row(24142, "3B", 16, H100, 10, micro=3, again=False),
    _mpt_row(10643, "7B", 8, H100, 6, again=False),
    _mpt_row(6935, "7B", 8, H100, 8, micro=2, seq=8192, again=True),
    _mpt_row(4792, "13B", 8, H100, 2, again=False),
    _mpt_row(4800, "13B", 64, H100, 2, again=False),
    _mpt_row(2308, "30B", 32, H100, 14, micro=3, again=True),
    _mpt_row(1039, "70B", 64, H100, 8, micro=4, again=True),
)

# GPT on the Megatron-LM of 2022, without data parallelism: all of a layer computed again, or its attention alone, with sequence
# parallelism. Gradients of weights run beside the messages of the backward.

AGAIN = replace(
    MEGATRON,
    options=replace(MEGATRON.options, recipe=MEGATRON_2019),
    source="Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5",
    copied=0,
    hides_backward=True,
)
# Of a layer, all is kept but what attention has of the size of its scores, and what gathers the parts of a sequence.
BUT_SCORES = (
    "norm1", "norm2", "attn autoshard_published.add_bias", "attn bmm #2", "attn mm", "mlp.up mm", "blocks.* mm", "reduce_scatter",
    "blocks.* prims.convert_element_type #2", "drop_and_add", "blocks.* getitem",
)  # fmt: skip
SEQUENCE = replace(
    AGAIN, options=replace(AGAIN.options, recipe="megatron", recompute="auto"), selective=BUT_SCORES, runs_to_end=False
)


def _megatron_rows(
    size: str, config: gpt.Config, batch: int, micro: int, again: float, sequence: float, stages: int = 1, chunks: int = 1
) -> tuple[Row, ...]:
    """Return the two runs of a model, whose steps took `again` and `sequence` seconds."""
    stage = gpt_of(replace(config, layers=config.layers // stages))
    tokens = batch * micro * config.seq
    return tuple(
        Row(
            f"GPT {size}, {8 * stages} A100, {way}", "tp + pp, held out" if stages > 1 else "tp, held out", tokens / published,
            "tokens/s", stage, "tp=8", batch, stack, lambda row, seconds: tokens / seconds, micro, stages, chunks,
        )
        for way, stack, published in (("computed again", AGAIN, again), ("sequence parallel", SEQUENCE, sequence))
    )  # fmt: skip


GPTS = (
    *_megatron_rows("22B", gpt_config(48, 6144, 64), 4, 1, 1.42, 1.10),
    *_megatron_rows("175B", gpt_config(96, 12288, 96), 1, 64, 18.13, 13.75, 8, 3),
    *_megatron_rows("530B", gpt_config(105, 20480, 128), 1, 280, 49.05, 37.83, 35, 3),
    *_megatron_rows("1T", gpt_config(128, 25600, 160), 1, 512, 94.42, 71.49, 64),
)

HELD_OUT = (*LLAMAS, *H200, *MPTS, *GPTS)
