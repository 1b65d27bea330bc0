"""Compare the searched plan with the best recipe over many cases: `python -m benchmarks.grid`.

Models from 124M to 70B parameters, from 8 to 2048 devices, four kinds of hardware, small and large batches, short and
long sequences. Per case: the simulated step of the chosen plan, that of the best recipe that fits in memory, their
ratio, how far the solver's model is off, and the seconds of planning; in the end the worst ratio and the median gain.
Nothing runs on devices. A name, such as `llama3_8b`, runs that model's cases alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import MemoryLimitError, Mesh, Options
from autoshard.planner.effort import EXHAUSTIVE
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from examples.gpt import gpt2
from examples.llama import llama3_8b, llama3_70b
from examples.vit import vit_huge, vit_large


def wide_mlp(batch: int, hidden: int = 1 << 17) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return two layers with far more `hidden` columns than the batch has rows."""
    model = nn.Sequential(nn.Linear(8192, hidden), nn.ReLU(), nn.Linear(hidden, 8192))
    return _WithLoss(model), (torch.zeros(batch, 8192), torch.zeros(batch, 8192))


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


@dataclass(frozen=True)
class Case:
    """A model, the mesh that it is planned for, and the sizes of its global batch."""

    build: Callable[..., tuple[nn.Module, tuple[Any, ...]]]
    mesh: str
    hardware: str
    sizes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{self.build.__name__} {self.mesh} {self.hardware}, {sizes}"


CASES = (
    Case(gpt2, "dp=8", "a100", {"batch": 64, "seq": 1024}),
    Case(gpt2, "dp=8", "a100", {"batch": 8, "seq": 1024}),
    Case(gpt2, "dp=4,tp=2", "h100", {"batch": 512, "seq": 1024}),
    Case(gpt2, "dp=2,tp=4", "h100", {"batch": 2, "seq": 8192}),
    Case(gpt2, "dp=32,tp=8", "b200", {"batch": 1024, "seq": 1024}),
    Case(llama3_8b, "dp=8", "h100", {"batch": 8, "seq": 2048}),
    Case(llama3_8b, "tp=8", "h100", {"batch": 1, "seq": 8192}),
    Case(llama3_8b, "dp=8,tp=8", "a100", {"batch": 16, "seq": 2048}),
    Case(llama3_8b, "dp=32,tp=8", "h100", {"batch": 64, "seq": 8192}),
    Case(llama3_8b, "dp=64", "h100", {"batch": 64, "seq": 4096}),
    Case(llama3_8b, "dp=4,tp=8", "h200", {"batch": 4, "seq": 32768}),
    Case(llama3_8b, "dp=256,tp=8", "h100", {"batch": 512, "seq": 4096}),
    Case(llama3_8b, "dp=16,tp=8", "b200", {"batch": 256, "seq": 4096}),
    Case(llama3_70b, "dp=8,tp=8", "h200", {"batch": 8, "seq": 4096}),
    Case(llama3_70b, "dp=32,tp=8", "h100", {"batch": 32, "seq": 4096}),
    Case(llama3_70b, "dp=32,tp=8", "b200", {"batch": 64, "seq": 8192}),
    Case(llama3_70b, "dp=256,tp=8", "h200", {"batch": 512, "seq": 4096}),
    Case(vit_large, "dp=8", "a100", {"batch": 256}),
    Case(vit_large, "dp=4,tp=2", "h100", {"batch": 16}),
    Case(vit_huge, "dp=64", "h100", {"batch": 4096}),
    Case(vit_huge, "dp=8,tp=8", "a100", {"batch": 64}),
    Case(wide_mlp, "dp=8", "h100", {"batch": 4096}),
    Case(wide_mlp, "tp=8", "a100", {"batch": 64}),
    Case(wide_mlp, "dp=4,tp=8", "h100", {"batch": 1024}),
    Case(wide_mlp, "dp=2,tp=8", "b200", {"batch": 65536}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names of models; by default all")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.models or case.build.__name__ in given.models]
    ratios = [ratio for case in cases if (ratio := measure(case)) is not None]
    if not ratios:
        sys.exit("no recipe fits in any of these cases")
    gain = 1 - statistics.median(ratios)
    print(f"{len(cases)} cases, {len(ratios)} with a recipe that fits: worst ratio {max(ratios):.3f}, median gain {gain:.1%}")


def measure(case: Case) -> float | None:
    """Plan and print one case; return the chosen step over that of the best recipe that fits, if there is one."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model, args = case.build(**case.sizes)
    started = time.perf_counter()
    try:
        mesh = Mesh(case.mesh, hardware=case.hardware)
        plan, _ = plan_ahead(PlanRequest(model, args, {}, mesh, Options(mixed_precision=policy)), effort=EXHAUSTIVE)
    except MemoryLimitError as error:
        print(f"{case}: {error}", flush=True)
        return None
    seconds = time.perf_counter() - started
    assert plan.cost is not None and plan.search is not None
    experts = [one for one in plan.search.candidates if one.name != "solved" and one.cost is not None and one.fits]
    best = min(experts, key=lambda one: one.cost.step_time if one.cost else 0.0, default=None)
    solved = next((one.cost for one in plan.search.candidates if one.name == "solved"), None)
    objective = plan.search.objective
    model_off = "" if solved is None or objective is None else f", model {objective / solved.step_time:.3f}"
    gap = "" if plan.search.gap is None else f", gap {plan.search.gap:.2%}"
    line = f"{case}: {plan.search.chosen} {plan.cost.step_time * 1e3:.1f} ms"
    if best is None or best.cost is None:
        print(f"{line}, no recipe fits{model_off}{gap}, {seconds:.0f} s", flush=True)
        return None
    ratio = plan.cost.step_time / best.cost.step_time
    alone = "" if solved is None else f" (solver's alone {solved.step_time / best.cost.step_time:.3f})"
    print(
        f"{line}, best recipe {best.name} {best.cost.step_time * 1e3:.1f} ms, ratio {ratio:.3f}{alone}{model_off}{gap}, "
        f"{seconds:.0f} s",
        flush=True,
    )
    return ratio


if __name__ == "__main__":
    main()
