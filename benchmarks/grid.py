"""Compare the searched plan with the best recipe over many cases: `python -m benchmarks.grid`.

Models from 124M to 70B parameters, from 8 to 2048 devices, six kinds of hardware, fast and slow networks, small and large
batches, short and long sequences. Per case: the simulated step of the chosen plan, that of the best recipe that fits in
memory, their ratio, the lowest ratio that the search's bound leaves, how far the solver's model is off, and the seconds of
planning; in the end the worst ratio and the median gain. Nothing runs on devices. A name, such as `llama3_8b`, runs that
model's cases alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import MemoryLimitError, Mesh, Options
from autoshard.planner.effort import EXHAUSTIVE
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from autoshard.planner.standings import SOLVED
from benchmarks.grid_cases import CASES, Case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names of models; by default all")
    parser.add_argument("--json", type=Path, help="a file to write the rows to")
    given = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        if given.models and case.build.__name__ not in given.models:
            continue
        try:
            rows.append(row := measured(case))
        except MemoryLimitError as error:
            print(f"{case}: {error}", flush=True)
            continue
        print(row, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if not ratios:
        sys.exit("no recipe fits in any of these cases")
    gain = 1 - statistics.median(ratios)
    print(f"{len(rows)} cases, {len(ratios)} with a recipe that fits: worst ratio {max(ratios):.3f}, median gain {gain:.1%}")


@dataclass(frozen=True)
class Row:
    """The plan of a case beside the best recipe that was simulated and fits; None: there is none. Times in seconds."""

    case: str
    chosen: str
    step: float
    recipe: str | None
    recipe_step: float | None
    solved_step: float | None  # of the solver's own plan
    objective: float | None  # that the solver minimised
    bound: float | None  # of the objective
    planning: float

    @property
    def ratio(self) -> float | None:
        """Return the chosen step as a part of the best recipe's."""
        return None if self.recipe_step is None else self.step / self.recipe_step

    def __str__(self) -> str:
        parts = [f"{self.case}: {self.chosen} {self.step * 1e3:.1f} ms"]
        if self.recipe_step is None:
            parts.append("no recipe fits")
        else:
            parts.append(f"best recipe {self.recipe} {self.recipe_step * 1e3:.1f} ms, ratio {self.ratio:.3f}")
            if self.bound is not None:
                parts.append(f"{self.bound / self.recipe_step:.3f} by the bound")
            if self.solved_step is not None:
                parts.append(f"{self.solved_step / self.recipe_step:.3f} by the solver alone")
        if self.objective is not None and self.solved_step is not None:
            parts.append(f"model {self.objective / self.solved_step:.3f}")
        if self.objective is not None and self.bound is not None:
            parts.append(f"gap {1 - self.bound / self.objective:.2%}")
        return ", ".join([*parts, f"{self.planning:.0f} s"])


def measured(case: Case) -> Row:
    """Plan a case and simulate all recipes. Raises MemoryLimitError where no plan fits."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model, args = case.build(**case.sizes)
    started = time.perf_counter()
    mesh = Mesh(case.mesh, hardware=case.hardware)
    plan, _ = plan_ahead(PlanRequest(model, args, {}, mesh, Options(mixed_precision=policy)), effort=EXHAUSTIVE)
    seconds = time.perf_counter() - started
    assert plan.cost is not None and plan.search is not None
    steps = {one.name: one.cost.step_time for one in plan.search.candidates if one.cost is not None and one.fits}
    solved = next((one.cost.step_time for one in plan.search.candidates if one.name == SOLVED and one.cost), None)
    recipes = [name for name in steps if name.partition(",")[0] != SOLVED]
    best = min(recipes, key=lambda name: steps[name], default=None)
    return Row(
        str(case),
        plan.search.chosen,
        plan.cost.step_time,
        best,
        None if best is None else steps[best],
        solved,
        plan.search.objective,
        plan.search.bound,
        seconds,
    )


if __name__ == "__main__":
    main()
