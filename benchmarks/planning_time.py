"""How long a plan takes, and how it compares with recipes: `python -m benchmarks.planning_time`.

For each model, built on meta: seconds of each phase from module to plan, peak memory of this process, the step that
the search predicts with its proven bound, and the simulated step of the chosen plan and of each simulated recipe.
Each model is planned in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, ShardingPlan
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from examples.gpt import gpt2
from examples.llama import llama3_8b, llama3_70b, llama3_405b

Example = Callable[..., tuple[nn.Module, tuple[Any, ...]]]


@dataclass(frozen=True)
class Case:
    """A model with the mesh it is planned for and the samples of its global batch."""

    build: Example
    mesh: str
    batch: int
    hardware: str = "h100"


CASES = {
    "gpt2": Case(gpt2, "dp=4,tp=2", 64),
    "8b": Case(llama3_8b, "dp=32,tp=8", 64),
    "70b": Case(llama3_70b, "dp=32,tp=8", 64),
    "70b-1": Case(llama3_70b, "dp=32,tp=8", 32),  # one sequence per data-parallel rank: weights outweigh activations
    "405b": Case(llama3_405b, "dp=16,cp=2,tp=8", 32, "h200"),
    "8b-1m": Case(partial(llama3_8b, seq=1 << 20), "cp=8,tp=8", 1),
    "405b-128k": Case(partial(llama3_405b, seq=1 << 17), "cp=16,tp=8", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--hardware", help="instead of the case's own")
    parser.add_argument("--recipe", default="auto", help="'context+megatron' for the cases with long sequences")
    given = parser.parse_args()
    for name in given.cases or CASES:
        hardware = given.hardware or CASES[name].hardware
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, hardware, given.recipe))
        process.start()
        process.join()


def measure(name: str, hardware: str, recipe: str) -> None:
    """Plan one case, and print what came of it."""
    case, phases = CASES[name], _Phases()
    mesh = Mesh(case.mesh, hardware=hardware)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    phases("model")
    with torch.device("meta"):
        model, args = case.build(batch=case.batch)
    request = PlanRequest(model, args, {}, mesh, Options(recipe=recipe, mixed_precision=policy))
    plan = ShardingPlan.of(*plan_ahead(request, progress=phases))
    phases("")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    after = sum(seconds for phase, seconds in phases.seconds.items() if phase not in ("model", "capture", "trace"))
    total = sum(phases.seconds.values())
    print(f"{name} on {case.mesh} {hardware}: {total:.1f} s, {after:.1f} s after capture, {peak:.2f} GB", flush=True)
    print("  " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.seconds.items() if seconds >= 0.05))
    _compare(plan)


class _Phases:
    """Seconds by phase, as planning reports them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.phase, self.since = "", time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        if self.phase:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now


def _compare(plan: ShardingPlan) -> None:
    assert plan.cost is not None
    if plan.search is None:
        print(f"  step {plan.cost.step_time * 1e3:.1f} ms, peak {plan.cost.peak_memory / 1e9:.1f} GB", flush=True)
        return
    if plan.search.objective is not None and plan.search.solver_gap is not None:
        solved = next((one.cost for one in plan.search.candidates if one.name == "solved"), None)
        off = "" if solved is None else f", {plan.search.objective / solved.step_time:.3f} of what is simulated"
        print(f"  solver: {plan.search.objective * 1e3:.1f} ms, proven gap {100 * plan.search.solver_gap:.2f} %{off}")
    for one in plan.search.candidates:
        if one.cost is None:
            print(f"  {one.name:16} {one.note}")
            continue
        mark, ratio = "*" if one.name == plan.search.chosen else " ", one.cost.step_time / plan.cost.step_time
        print(
            f"{mark} {one.name:16} step {one.cost.step_time * 1e3:8.1f} ms ({ratio:.3f}), exposed "
            f"{one.cost.exposed_comm * 1e3:7.1f} ms, peak {one.cost.peak_memory / 1e9:6.1f} GB{'' if one.fits else ', too much'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
