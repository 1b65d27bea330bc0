"""Switch each heuristic of the search and of planning off alone: `python -m benchmarks.ablation [NAME ...] [--case NAME]`.

Each case is planned with everything on, then with one heuristic replaced by the simplest that works. Print, over all cases:
the simulated step of the chosen plan as a part of that with everything on (the worst, and the mean), by how much the
solver's proven gap grows (the mean, in points), the processor seconds as a part, and the lines that the heuristic takes.
`--each` prints the same for each case. A heuristic that moves nothing can go.

With `--alone`, the solver solves each case by itself, in all the memory that it takes without a limit, in 80 % of that, and in
half of it with recomputation. The step is then the objective, and nothing is simulated.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import MemoryLimitError, Mesh, Options
from autoshard.config.progress import Progress, silent
from autoshard.planner import candidates, decision, recipe_candidates, recomputation, solver_candidate, ties
from autoshard.planner.decision import decide
from autoshard.planner.effort import FULL, STEPS, Effort
from autoshard.planner.evaluation import Folded, fold, in_chunks
from autoshard.planner.paddings import batch_padding, variants
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.request import PlanRequest
from autoshard.planner.solver_candidate import stated
from autoshard.planner.standings import SearchTask
from benchmarks.grid_models import wide_mlp
from examples import llama
from examples.gpt import gpt2
from examples.vit import vit_huge
from passes.cost.scheduling import best_schedule, bucketing
from passes.search import optimize, prepared, recomputation_savings, search_state, solution, tune_multipliers
from passes.search.goal import Goal
from passes.search.model import (
    axis_groups,
    grouping,
    step_structure,
    strategies,
    tied_layers,
    transitions,
    value_edges,
    variables,
)
from passes.search.model.axis_groups import single_axes
from passes.search.model.transitions import Transitions
from passes.search.prepared import Prepared
from passes.search.solvers import highs, mip, mip_columns
from passes.search.solvers.transition_factors import TransitionFactor

Build = Callable[..., tuple[nn.Module, tuple[Any, ...]]]


@dataclass(frozen=True)
class Case:
    """A model on a mesh, in `memory` of the bytes that its plan takes without a limit; None: in those of the device."""

    build: Build
    mesh: str
    hardware: str
    sizes: dict[str, int]
    memory: float | None = None


class _OfLaunches(nn.Module):
    """A language model whose kernels take less time than their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def of_launches() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model of nine parameters and a batch of 8 x 16 tokens."""
    return _OfLaunches(), (torch.zeros(8, 16, dtype=torch.long),) * 2


def small_llama(batch: int, seq: int) -> llama.Case:
    """Return a decoder of four layers whose kernels take about as long as their launches."""
    return llama.step_of(llama.Config(layers=4, dim=512, heads=8, kv_heads=4, hidden=1408, vocab=4096), batch, seq)


CASES = {
    "launches": Case(of_launches, "dp=2,tp=2", "h100", {}, 0.9),
    "tiny": Case(small_llama, "dp=2,tp=2", "h100", {"batch": 8, "seq": 256}),
    "wide": Case(small_llama, "dp=16,tp=8", "h100", {"batch": 256, "seq": 1024}),
    "small memory": Case(small_llama, "dp=4,tp=2", "a100", {"batch": 64, "seq": 1024}, 0.6),
    "wide mlp": Case(wide_mlp, "dp=4,tp=8", "h100", {"batch": 1024}),
    "slow links": Case(wide_mlp, "dp=2,tp=2", "a100-pcie", {"batch": 4096, "hidden": 8192}),
    "gpt2": Case(gpt2, "dp=8", "h100", {"batch": 8}),
    "vit": Case(vit_huge, "dp=8,tp=8", "a100", {"batch": 64}),
    "three axes": Case(wide_mlp, "dp=8,cp=2,tp=8", "h100", {"batch": 16384, "hidden": 8192}),
}


@dataclass(frozen=True)
class Heuristic:
    """Hold what to replace to switch it off, and the code that would go. A patch is (owner, attribute, instead)."""

    patches: tuple[tuple[Any, str, Any], ...]
    code: tuple[Any, ...] = ()

    @property
    def lines(self) -> int:
        """Return the lines of its code; a constant has one."""
        return sum(len(inspect.getsource(one).splitlines()) for one in self.code) or len(self.patches)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch it off."""
        with ExitStack() as stack:
            for owner, name, instead in self.patches:
                stack.enter_context(patch.object(owner, name, instead))
            yield


class _Apart:
    """Groups of one call each."""

    def __init__(self, *_: object) -> None: ...

    def of(self, calls: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(call,) for call in calls]


def _untied(gm: Any) -> tied_layers.TiedLayers:
    found = _tied_layers(gm)
    return replace(found, leader={node: node for node in found.leader})


def _with_recomputation(task: SearchTask, standings: Any, stated: Any) -> Any:
    curve = recomputation.memory_budget_of(task.problem, stated).recomputation
    asked = solver_candidate.ask(task, standings, stated, curve)
    return solver_candidate._taken(solver_candidate.Solved(), asked, stated)


def _once(asked: float, attempt: Any, **_: object) -> Any:
    tried = attempt(asked)
    return None if tried is None else tried.found


def _best_in_chunks(task: SearchTask, standings: Any) -> str:
    best: str = standings.best
    standings.evaluated[best] = in_chunks(task.problem, standings.evaluated[best])
    return best


def _from_the_start(self: Prepared, transitions: Transitions) -> Prepared:
    return replace(self, corrected=transitions, searches={}, proven={})


def _padded_only(problem: Problem, folded: Folded, effort: Effort, progress: Progress) -> Any:
    return candidates.search(SearchTask(problem, folded, effort), progress), problem, folded


_tied_layers, _evaluate = tied_layers.tied_layers, SearchTask.evaluate

HEURISTICS = {
    "equal layers tied": Heuristic(((step_structure, "tied_layers", _untied),), (tied_layers,)),
    "calls of a kernel as one variable": Heuristic(((variables, "Grouping", _Apart),), (grouping,)),
    "rows: 12 a node and axis": Heuristic(((strategies, "ROWS", 1 << 30),)),
    "rows: partial sums reduced first": Heuristic(
        ((strategies._RowTable, "_never_pays", lambda *_: False),),
        (strategies._RowTable._never_pays, strategies._RowTable._takes),
    ),
    "rows: implied by neighbours": Heuristic(
        ((strategies, "SWEEPS", 0),), (strategies._RowTable._from_operands, strategies._RowTable._to_operands)
    ),
    "transitions repeated in the backward": Heuristic(
        ((value_edges, "_repeat_segment", lambda *_: -1),),
        (value_edges._repeat_segment, mip_columns._add_repeat),
    ),
    "recomputation in the objective": Heuristic(
        ((prepared, "recomputation_savings", lambda *_: ()),), (recomputation_savings,)
    ),
    "least memory first": Heuristic(((optimize, "fit_memory", lambda *_: True),), (tune_multipliers.fit_memory,)),
    "multipliers by linear programs": Heuristic(((tune_multipliers, "ROUNDS", 0),), (mip.Formulation.multipliers,)),
    "strategies near the bound at first": Heuristic(((tune_multipliers, "NEAR", (0.0,)),)),
    "strategies further from the bound": Heuristic(((tune_multipliers, "NEAR", tune_multipliers.NEAR[:1]),)),
    "bytes over the limit at a price": Heuristic(
        ((tune_multipliers, "_price_over", lambda _: None),), (tune_multipliers._price_over, mip.Formulation._with_bytes_over)
    ),
    "program of bytes alone": Heuristic(((optimize, "_fit", lambda _: True),), (optimize._fit, mip.Formulation.fit)),
    "widened in steps": Heuristic(((optimize, "WIDENINGS", optimize.WIDENINGS[-1:]),)),
    "widened at all": Heuristic(((optimize, "_widen", lambda _: None),), (optimize._widen, optimize._solve_below)),
    "large programs of small savings left out": Heuristic(
        ((Goal, "is_worthwhile", lambda *_: True),), (Goal.is_worthwhile, optimize._is_worthwhile)
    ),
    "programs solved without presolve": Heuristic(((highs, "PRESOLVE", "choose"),)),
    "users share a transition's cost": Heuristic(
        ((TransitionFactor, "share", lambda _: None),), (TransitionFactor.share,)
    ),
    "pruning sweeps": Heuristic(((search_state, "PRUNING_SWEEPS", 1), (tune_multipliers, "PRUNING_SWEEPS", 1))),
    "less communication if equal": Heuristic(((mip_columns, "TIE", 0.0), (mip, "TIE", 0.0))),
    "axes in groups": Heuristic(
        ((solver_candidate, "coarse_groups", lambda _: ()),),
        (axis_groups, solver_candidate._solve_grouped, solver_candidate._first_step),
    ),
    "solved first without recomputation": Heuristic(
        ((solver_candidate, "_solve_whole", _with_recomputation),), (solver_candidate._solve_whole,)
    ),
    "longer search simulated": Heuristic(
        ((solver_candidate, "_improved", lambda _, __, answer, ___: answer),), (solver_candidate._improved,)
    ),
    "asked again for less memory": Heuristic(((solver_candidate, "shrink", _once),)),
    "asked again for more memory": Heuristic(
        ((solver_candidate, "_with_estimate_corrected", lambda _, answer, __: answer),),
        (solver_candidate._with_estimate_corrected, solver_candidate._excess, solver_candidate._faster),
    ),
    "prices corrected by simulation": Heuristic(
        ((solver_candidate, "REPRICINGS", 0),),
        (solver_candidate._repriced, prepared.Prepared.corrected_by, transitions.Transitions.corrected, solution.strategies_of),
    ),
    "corrected prices solved from where the last search ended": Heuristic(
        ((prepared.Prepared, "_priced", _from_the_start),), (search_state.WarmStart,)
    ),
    "programs that grow too large left out": Heuristic(((tune_multipliers, "PROVABLE", 1 << 30),)),
    "runners-up simulated": Heuristic(
        ((solver_candidate, "RUNNERS_UP", 0),), (solver_candidate._runners_up, prepared.Prepared.runners_up)
    ),
    "recipes": Heuristic(((candidates, "try_recipes", lambda *_: None),), (recipe_candidates,)),
    "recipes pruned by bounds": Heuristic(
        ((SearchTask, "evaluate", lambda self, *args, **_: _evaluate(self, *args)),), ()
    ),
    "chunks of all that could win": Heuristic(((candidates, "_cut", _best_in_chunks),), (candidates._cut,)),
    "buckets that grow": Heuristic(((best_schedule, "Growing", lambda nbytes: nbytes),), (bucketing.Growing,)),
    "padded or not": Heuristic(((decision, "best_of_variants", _padded_only),), (batch_padding, variants, candidates.compared)),
    "dims padded for other axes": Heuristic(
        ((variants, "MOST_AXES", 0),), (variants._with_dims_padded_for_other_axes,)
    ),
    "ties: the sturdier": Heuristic(((ties, "_slowed", lambda _: 0.0),), (ties._slowed,)),
    "ties: the smaller": Heuristic(((ties, "_bytes", lambda _: 0.0),), (ties._bytes,)),
    "ties: the simpler": Heuristic(((ties, "TIE", 0.0),)),
}


@dataclass(frozen=True)
class Result:
    """A plan's simulated step in seconds, the solver's objective and its gap, and the processor seconds of planning."""

    step: float
    objective: float
    gap: float
    seconds: float
    peak: int = 0

    def over(self, usual: Result) -> Result:
        """Return step, objective and seconds as parts of the usual ones, and what is added to the gap."""
        parts = (
            1.0 if self.step == usual.step else self.step / usual.step,  # both infinite where neither found a plan
            1.0 if self.objective == usual.objective else self.objective / usual.objective,
            self.gap - usual.gap,
            self.seconds / usual.seconds,
        )
        return Result(*parts)


FAILED = Result(float("inf"), float("inf"), 1.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heuristics", nargs="*", help=f"of {', '.join(HEURISTICS)}; by default all")
    parser.add_argument("--case", action="append", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--alone", action="store_true", help="the solver alone, without simulation")
    parser.add_argument("--each", action="store_true", help="print each case, too")
    given = parser.parse_args()
    runs = dict[str, Callable[[], Result]]()
    for name in given.case or CASES:
        runs |= _alone(name, CASES[name]) if given.alone else {name: partial(planned, *_stated(CASES[name]))}
    usual = {name: run() for name, run in runs.items()}
    for name, one in usual.items():
        print(f"{name}: {one.step * 1e3:.2f} ms, gap {one.gap:.2%}, {one.seconds:.1f} s", flush=True)
    print("| off | step: worst | mean | gap | seconds | lines |\n|---|---|---|---|---|---|")
    for name in given.heuristics or HEURISTICS:
        heuristic = HEURISTICS[name]
        with heuristic.off():
            found = {case: run().over(usual[case]) for case, run in runs.items()}
        print(_row(name, list(found.values()), heuristic.lines), flush=True)
        if given.each:
            for case, one in found.items():
                figures = (
                    f"step {one.step:.4f}, objective {one.objective:.4f}, gap {one.gap:+.2%}, seconds {one.seconds:.2f}"
                )
                print(f"    {case}: {figures}", flush=True)


def _row(name: str, found: Sequence[Result], lines: int) -> str:
    steps, gap = [one.step for one in found], statistics.mean(one.gap for one in found)
    seconds = statistics.mean(one.seconds for one in found)
    return f"| {name} | {max(steps):.3f} | {statistics.mean(steps):.3f} | {gap:+.2%} | {seconds:.2f} | {lines} |"


def _stated(case: Case) -> tuple[Problem, Folded]:
    """Return the problem of a case and its folded graph; with `memory`, it is planned without a limit first."""
    problem = _problem(case)
    folded = fold(problem)
    if case.memory is None:
        return problem, folded
    limit = int(case.memory * planned(problem, folded).peak)
    return replace(problem, options=replace(problem.options, memory_limit=limit)), folded


def _problem(case: Case) -> Problem:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model, args = case.build(**case.sizes)
    mesh = Mesh(case.mesh, hardware=case.hardware)
    return captured_problem(PlanRequest(model, args, {}, mesh, Options(mixed_precision=policy)).checked())


def planned(problem: Problem, folded: Folded) -> Result:
    """Plan from the folded graph, with nothing known of earlier searches."""
    folded, started = replace(folded, placed={}, prepared={}), time.process_time()
    try:
        found = decide(problem, folded, FULL, silent)
    except MemoryLimitError:
        return FAILED
    seconds, search = time.process_time() - started, found.search
    assert search is not None and found.cost is not None
    objective = search.objective if search.objective is not None else found.cost.step_time
    gap = search.solver_gap if search.solver_gap is not None else 1.0
    return Result(found.cost.step_time, objective, gap, seconds, found.cost.peak_memory)


def _alone(name: str, case: Case) -> dict[str, Callable[[], Result]]:
    """Return searches of a case in all memory, in 80 % of what that takes, and in half of it with recomputation."""
    problem = _problem(case)
    folded = fold(problem)
    ample = Goal(steps=STEPS)
    nbytes = solved(problem, folded, ample).peak
    less, least = (replace(ample, memory_limit=part * nbytes) for part in (0.8, 0.5))
    return {
        f"{name}, all memory": partial(solved, problem, folded, ample),
        f"{name}, 80 %": partial(solved, problem, folded, less),
        f"{name}, 50 % with recomputation": partial(solved, problem, folded, least, recomputes=True),
    }


def solved(problem: Problem, folded: Folded, goal: Goal, *, recomputes: bool = False) -> Result:
    """State the problem of the solver and solve it, with nothing known of earlier searches."""
    started = time.process_time()
    task = SearchTask(problem, replace(folded, placed={}, prepared={}), FULL)
    prepared = stated(task, single_axes(problem.mesh))
    assert prepared is not None
    try:
        *_, last = prepared.solutions(replace(goal, recomputation=prepared.recomputation if recomputes else ()))
    except MemoryLimitError:
        return FAILED
    return Result(last.objective, last.objective, last.gap, time.process_time() - started, int(last.memory))


if __name__ == "__main__":
    main()
