"""Predict runs whose speed was published, as each was run: `python -m benchmarks.published`.

A row is one run: its model, parallelism, batch, sequence, recomputation, precision and chip. The table has the published
speed, the predicted one, and their ratio; `--json FILE` writes the rows. No figure of the cost model is fitted to a row.
Nothing runs on devices. Words, such as `8B FSDP`, predict the rows alone whose names have all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, Overlap
from autoshard.planner.chunking import Chunking
from autoshard.planner.effort import FULL
from autoshard.planner.evaluation import fold, phases_of
from autoshard.planner.problem import captured_problem
from autoshard.planner.recomputation import Kept, Settling
from autoshard.planner.request import PlanRequest
from autoshard.config.axis_recipes import recipes_of
from examples import llama
from passes.base import PassContext
from passes.cost.simulate import Timeline
from passes.ir.graph import copy_graph
from passes.manager import PassManager

# Llama on H100 with 96 GB of HBM2e and a limit of 500 W: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md and
# asyncTP_llama3_h100_2025-06_torchtitan.md. GPT on A100: Narayanan et al. 2021, arXiv 2104.04473, table 1; batch and
# micro-batch from Megatron-LM's examples/sc21/run_table_1.sh.
BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float16)
SEQ_LLAMA, SEQ_GPT, VOCAB_GPT = 8192, 2048, 51200

# torchtitan's selective recomputation keeps the results of attention and of every second product of a layer, in the order
# wq, wk, wv, wo, w1, w3, w2.
SELECTIVE = ("attention.wq mm", "attention.wv mm", "feed_forward.w1 mm", "feed_forward.w2 mm", "attention flash")


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    published: float
    unit: str
    build: Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]] = field(repr=False)
    mesh: str
    hardware: str
    batch: int
    options: Options = field(repr=False)
    selective: bool = False


def local_step(row: Row) -> Timeline:
    with torch.device("meta"):
        model, args = row.build(row.batch)
    request = PlanRequest(model, args, {}, Mesh(row.mesh, hardware=row.hardware), row.options).checked()
    problem = captured_problem(request)
    folded = fold(problem)
    gm, ctx = copy_graph(folded.graph), PassContext(problem.mesh)
    phases = phases_of(problem, gm, recipes_of(row.options.recipe, problem.mesh))
    PassManager((*phases.place, *phases.lower)).run(gm, ctx)
    settling = Settling(problem, folded.repeats, gm)
    if row.selective:
        kinds = dict.fromkeys(settling.blocks.kind.values())

        trial = settling.trial(tuple(k for k in kinds if k.removeprefix("layers.*.").startswith(SELECTIVE) or "scaled_dot" in k))
    else:
        trial = settling.settle()
    chunking = Chunking(problem, folded.repeats, trial, FULL)
    if chunking.could_save:
        tl, remarks = chunking.run()
        for r in remarks: print("   ", r)
        return tl
    return trial.timeline


def llama3(config):
    return lambda batch: llama.step_of(config, batch, SEQ_LLAMA)


plain = Overlap(split_matmuls=False)
chunked = Overlap(symmetric_memory=True)
ROWS = (
    Row("8B 8 FSDP", "fsdp", 6667, "tok", llama3(llama.LLAMA3_8B), "dp=8", "h100-500w", 16, Options(recipe="fsdp", mixed_precision=BF16), True),
    Row("8B.128 FSDP", "fsdp", 6514, "tok", llama3(llama.LLAMA3_8B), "dp=128", "h100-500w", 256, Options(recipe="fsdp", mixed_precision=BF16), True),
    Row("70B 256 TP", "fsdp+tp", 597.3, "tok", llama3(llama.LLAMA3_70B), "dp=32,tp=8", "h100-500w", 512, Options(recipe="fsdp+megatron", mixed_precision=BF16, recompute="block", overlap=plain)),
    Row("70B 256 async TP", "fsdp+async tp", 652.4, "tok", llama3(llama.LLAMA3_70B), "dp=32,tp=8", "h100-500w", 512, Options(recipe="fsdp+megatron", mixed_precision=BF16, recompute="block", overlap=chunked)),
    Row("8B 64 TP", "fsdp+tp", 4378, "tok", llama3(llama.LLAMA3_8B), "dp=8,tp=8", "h100-500w", 96, Options(recipe="fsdp+megatron", mixed_precision=BF16, overlap=plain), True),
    Row("8B 64 async TP", "fsdp+async tp", 4809, "tok", llama3(llama.LLAMA3_8B), "dp=8,tp=8", "h100-500w", 96, Options(recipe="fsdp+megatron", mixed_precision=BF16, overlap=chunked), True),
)


def main() -> None:
    import sys, collections, time
    for row in ROWS:
        if not all(w in row.name for w in sys.argv[1:]):
            continue
        t0 = time.time()
        tl = local_step(row)
        mesh = Mesh(row.mesh)
        tok = row.batch * SEQ_LLAMA / mesh.size / tl.step_time
        print(f"{row.name}: {tl.step_time*1e3:.0f} ms compute {tl.compute*1e3:.0f} comm {tl.communication*1e3:.0f} exposed {tl.exposed*1e3:.0f} mem {tl.peak_memory/2**30:.1f} {tok:.0f} ratio {tok/row.published:.3f}  ({time.time()-t0:.0f} s)")
        by = collections.Counter(); fl = collections.Counter(); nb = collections.Counter(); ct = collections.Counter()
        import re
        for t in tl.program.tasks:
            key = (t.kind if t.kind != "compute" else ("attn" if any("scaled_dot" in n for n in t.nodes) else "mm" if t.flops and any(re.match(r"(mm|addmm|bmm|baddbmm)", n) for n in t.nodes) else "sym" if t.link else "pw"), t.stream[:3], "B" if t.backward else "F")
            by[key] += t.seconds; fl[key] += t.flops; nb[key] += t.nbytes; ct[key] += 1
        for k in sorted(by): print("   ", k, f"{by[k]*1e3:.1f} ms, {fl[k]/1e12:.1f} TF {fl[k]/by[k]/1e12 if by[k] else 0:.0f} TF/s, {nb[k]/1e9:.1f} GB, {nb[k]/by[k]/1e9 if by[k] else 0:.0f} GB/s n={ct[k]}")


if __name__ == "__main__":
    main()
