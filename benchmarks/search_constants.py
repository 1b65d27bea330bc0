"""Why the search's constants are what they are: `python -m benchmarks.search_constants`.

Printed are the processor seconds of a search, its bound and its step: for several gaps, and with each constant that has
no other source halved and doubled, as parts of those with the constants as they are. A search in little memory
takes half a minute or more, and there are thirty for each case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options
from autoshard.planner.evaluation import fold, seeded
from autoshard.planner.problem import captured_problem
from autoshard.planner.request import PlanRequest
from examples.gpt import gpt2
from examples.llama import llama3_8b
from passes.search import search_state, tune_multipliers
from passes.search.goal import Goal
from passes.search.prepared import Prepared, prepare

CASES: dict[str, tuple[Callable[..., tuple[nn.Module, tuple[Any, ...]]], str, int]] = {
    "gpt2": (gpt2, "dp=4,tp=2", 64),
    "8b": (llama3_8b, "dp=8,tp=8", 64),
}
TIGHT = 0.6  # of the bytes that the fastest plan takes: a limit that the search has to work for
CONSTANTS: tuple[tuple[ModuleType, str], ...] = (
    (search_state, "SWEEPS"),
    (search_state, "PRUNING_SWEEPS"),
    (tune_multipliers, "ROUNDS"),
    (tune_multipliers, "GAIN"),
    (tune_multipliers, "NEAR"),
    (tune_multipliers, "FAR"),
    (tune_multipliers, "OVER"),
    (search_state, "TOO_SLOW"),
    (tune_multipliers, "LARGE"),
    (tune_multipliers, "SMALL_GAP"),
    (tune_multipliers, "PROVABLE"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help=f"of {', '.join(CASES)}; by default all")
    for name in parser.parse_args().cases or CASES:
        compare(name, problem(name))


def problem(name: str) -> Prepared:
    """Return the search's problem of a case, on meta."""
    build, mesh, batch = CASES[name]
    with torch.device("meta"):
        model, args = build(batch=batch)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    on = Mesh(mesh, hardware="h100")
    asked = captured_problem(PlanRequest(model, args, {}, on, Options(mixed_precision=policy)))
    return prepare(seeded(asked, fold(asked), (None,) * on.ndim), on)


def compare(name: str, prepared: Prepared) -> None:
    """Print what the gap, and each constant, does to the search of a problem."""
    _ = prepared.transitions  # computed once for all searches
    for gap in (0.1, 0.02, Goal.gap):
        print(f"{name} to a gap of {gap:.1%}: {searched(prepared, Goal(gap=gap))}", flush=True)
    tight = Goal(memory_limit=TIGHT * searched(prepared, Goal()).memory)
    usual = searched(prepared, tight)
    print(f"{name} in {TIGHT:.0%} of the memory: {usual}", flush=True)
    for module, constant in CONSTANTS:
        value = getattr(module, constant)
        for factor in (0.5, 2):
            scaled = tuple(one * factor for one in value) if isinstance(value, tuple) else type(value)(value * factor)
            with patch.object(module, constant, scaled):
                found = searched(prepared, tight)
            print(f"  {module.__name__.rpartition('.')[2]}.{constant} x {factor}: {found.over(usual)}", flush=True)


@dataclass(frozen=True)
class Found:
    """The result of a search: processor seconds, bound and step in seconds, bytes."""

    seconds: float
    bound: float
    step: float
    memory: float

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, bound {self.bound * 1e3:.3f} ms, step {self.step * 1e3:.3f} ms"

    def over(self, other: Found) -> str:
        """Return the figures as parts of those of another."""
        parts = self.seconds / other.seconds, self.bound / other.bound, self.step / other.step
        return "seconds {:.2f}, bound {:.4f}, step {:.4f}".format(*parts)


def searched(prepared: Prepared, goal: Goal) -> Found:
    """Search a problem from the start."""
    prepared.searches.clear()
    started = time.process_time()
    *_, last = prepared.solutions(goal)
    return Found(time.process_time() - started, last.bound, last.objective, last.memory)


if __name__ == "__main__":
    main()
