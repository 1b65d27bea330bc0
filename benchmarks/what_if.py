"""How long `replan`, `explain` and `diff` take: `python -m benchmarks.what_if`.

Plans Llama 3 8B on 32 x 8 H100; then prints the seconds of CPU of `replan` for other hardware, meshes, limits, constraints and
a recipe, each with the step and peak of its answer, and those of `explain` and `diff`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from autoshard import Mesh, Options, plan
from examples.llama import llama3_8b

PIN = {"layers.*.attention.wq.weight": {"tp": Shard(0)}}
WEIGHT, MODULE = "layers.0.attention.wq.weight", "layers.0.feed_forward"
SHORT = 0.8, 0.4  # of the peak: a limit that binds, and one that needs recomputation


def main() -> None:
    with torch.device("meta"):
        model, args = llama3_8b(batch=64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = plan(model, Mesh("dp=32,tp=8", hardware="h100"), args, options=Options(mixed_precision=policy))
    assert made.cost is not None
    changes: tuple[dict[str, Any], ...] = (
        {"hardware": "h200"},
        {"hardware": "a100"},
        {"mesh": "dp=16,tp=16"},
        {"params": PIN},
        *({"memory_limit": int(part * made.cost.peak_memory)} for part in SHORT),
        {"recipe": "fsdp+megatron"},
        {"mesh": "pod=2,dp=8,cp=2,tp=8"},
        {"mesh": "dp=4,tp=8"},  # does not fit unless layers are computed again
        {"mesh": "dp=64,cp=2,tp=4"},
        {"mesh": "dp=16,cp=2,tp=8"},
    )
    for change in changes:
        started = time.process_time()
        found = made.replan(**change)
        seconds = time.process_time() - started
        assert found.cost is not None
        step, peak = found.cost.step_time * 1e3, found.cost.peak_memory / 1e9
        print(f"{seconds:5.1f} s of CPU, step {step:6.1f} ms, peak {peak:5.1f} GB: replan({change})", flush=True)
    for name, ask in {
        "explain, a weight, of the plan": lambda: made.explain(WEIGHT),
        "explain, a module, of the plan": lambda: made.explain(MODULE),
        "explain, a weight, of the last answer": lambda: found.explain(WEIGHT),
        "diff": lambda: made.diff(found),
    }.items():
        started = time.process_time()
        str(ask())
        print(f"{time.process_time() - started:5.1f} s of CPU: {name}", flush=True)


if __name__ == "__main__":
    main()
