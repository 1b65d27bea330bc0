"""Choose what the backward recomputes: as options say, or what makes a step fit in the least time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import GraphModule

from autoshard.compile.compiled import Split, split_program
from autoshard.phases import Phases
from autoshard.planner.effort import FULL, Effort
from autoshard.planner.prediction import memory_of, run_step
from autoshard.planner.problem import Problem
from autoshard.plans.outcome import Recomputation
from passes.base import PassContext
from passes.cost.build_program import program_of
from passes.cost.program import Program
from passes.cost.scheduling.least_step import least_of_graph, least_step
from passes.cost.shrink import Tried, shrink
from passes.cost.simulate import Timeline, simulate
from passes.cost.unroll import unroll
from passes.errors import UnlikeLayersError
from passes.ir.folded_layers import Repeats
from passes.ir.graph import (
    InputRole,
    copy_graph,
    has_backward,
    origin_of,
    placeholders,
    repeats_of,
    results_of,
    saving_of,
)
from passes.ir.recompute_blocks import Blocks
from passes.ir.units import format_seconds
from passes.manager import PassManager
from passes.search.model.memory_budget import MemoryBudget
from passes.search.prepared import Prepared
from passes.search.selective_recomputation import SelectiveRecomputation

Kept = tuple[str, ...] | None  # kinds of values that blocks keep; None: nothing is recomputed
FAR = 1.05  # times the memory limit: a better order cannot be expected to save more than this
FOLD = 3  # times all values of a step on one device: bound for gradients, AdamW's states, gathers and buckets


class SlowerError(Exception):
    """A program is slower than a known plan, whatever its order: its step takes at least `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"at least {format_seconds(seconds)}: not simulated")
        self.seconds = seconds


@dataclass(frozen=True)
class Trial:
    """A per-device program that keeps some values for the backward, and its simulated step."""

    kept: Kept
    split: Split
    program: Program
    timeline: Timeline
    freed: int | None = None  # bytes that are recomputed instead; None: the partitioner's choice is unchanged

    @property
    def recomputation(self) -> Recomputation | None:
        """Return what the backward recomputes, for the plan."""
        if self.kept is None or self.split.backward is None:
            return None
        graph = self.split.backward.graph
        remade = {node.name for node in graph.nodes if node.op == "call_function" and saving_of(node) == "remade"}
        tasks = [task for task in self.program.tasks if task.backward and task.nodes and remade.issuperset(task.nodes)]
        return Recomputation(
            self.kept,
            sum(task.seconds for task in tasks if not task.is_collective),
            sum(task.seconds for task in tasks if task.is_collective),
            self.freed,
        )


@dataclass(frozen=True)
class Settling:
    """Search for the program that `Options(recompute=...)` requests, given a folded LOCAL graph."""

    problem: Problem
    repeats: Repeats
    graph: GraphModule
    worst: float = float("inf")  # seconds: a step that is slower even without recomputation is not made to fit
    effort: Effort = FULL

    def settle(self) -> Trial:
        """Return the program; with `"auto"` one that fits if there is one, else the one with the least memory.

        Raises SlowerError if the program is proven to be slower than `worst`.
        """
        self._check_graph()
        recompute = self.problem.options.recompute
        if recompute == "block" and has_backward(self.graph.graph):
            trial = self.trial(())
            whole = split_program(self.graph, mode=self.problem.options.compile)
            return replace(trial, freed=self._saved(whole) - self._saved(trial.split))
        usual = self.trial(None)
        if recompute == "none" or self._fits(usual) or usual.split.backward is None:
            return usual
        return usual if self._is_slower(usual) else self._fitted(usual)

    def _is_slower(self, usual: Trial) -> bool:
        """Return whether a program that does not fit is slower than `worst` also in its best order in any memory.

        The best order of little memory may be far slower than that of a program which recomputes values, and so has memory left.
        """
        if usual.timeline.step_time < self.worst:
            return False
        options = self.problem.options
        fastest = run_step(usual.program, options, self.worst, effort=self.effort, in_any_memory=True)
        return fastest.step_time >= self.worst

    @property
    def limit(self) -> int:
        return self.problem.options.memory_bytes(memory_of(self.problem.mesh))

    def _fits(self, trial: Trial) -> bool:
        return trial.timeline.peak_memory <= self.limit

    def _excess(self, trial: Trial) -> int:
        return trial.timeline.peak_memory - self.limit

    def _fitted(self, usual: Trial) -> Trial:
        """Return the fastest trial that fits, else the smallest.

        First, as much as fits is kept, in the order of the program. Keeping less leaves memory in which communication
        hides, so half of it and nothing are tried as well. A quick search takes the first trial that fits, with memory
        left for one block that is recomputed.
        """
        keep = SelectiveRecomputation.of(self.graph.graph, self.repeats, _prices(usual.program))
        if not keep.seconds:  # no blocks, or none that keep more than their inputs
            return replace(usual, timeline=self._ordered(usual.program)) if self.effort.takes_first else usual
        tried = {usual.kept: usual}

        def attempt(budget: float) -> Tried[Trial]:
            kept = keep.within(budget)
            trial = tried[kept] = self.trial(kept)
            return Tried(trial, None if self._fits(trial) or not kept else keep.size(kept) - self._excess(trial))

        saved = self._saved(usual.split) - (keep.block if self.effort.takes_first else 0)
        last = shrink(saved - self._excess(usual), attempt)
        assert last is not None
        others = () if self.effort.takes_first and self._fits(last) else (keep.within(keep.size(last.kept or ()) / 2), ())
        for kept in dict.fromkeys(others):
            if kept not in tried:
                tried[kept] = self.trial(kept)
        best = min(tried.values(), key=self._rank)
        return replace(best, freed=usual.timeline.peak_memory - best.timeline.peak_memory)

    def _rank(self, trial: Trial) -> tuple[float, float]:
        timeline = trial.timeline
        return (0.0, timeline.step_time) if self._fits(trial) else (float(timeline.peak_memory), 0.0)

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.graph.graph)

    def _saved(self, split: Split) -> int:
        """Return the bytes that all blocks keep for the backward."""
        assert split.backward is not None
        counts = {node.name: self.repeats.count(origin_of(node).fqn) for node in self.blocks.block}
        nodes = placeholders(split.backward.graph, InputRole.SAVED)
        return sum(counts.get(node.name, 0) * one.nbytes for node in nodes for one in results_of(node))

    def trial(self, kept: Kept) -> Trial:
        """Simulate a step of all layers; the graph is not changed.

        A quick search does not look for the best order of a program that keeps everything, if it needs far too much
        memory and is not compared with another.
        """
        problem, gm = self.problem, copy_graph(self.graph)
        PassManager(Phases(kept=kept).rematerialize).run(gm, PassContext(problem.mesh))
        split = split_program(gm, mode=problem.options.compile)
        program = program_of_split(split, problem, self.repeats)
        self._check_promise(program)
        if self.effort.takes_first and kept is None and problem.options.recompute == "auto" and self.worst == float("inf"):
            lowered = simulate(program)
            if lowered.peak_memory > FAR * self.limit:
                return Trial(kept, split, program, lowered)
        return Trial(kept, split, program, self._ordered(program))

    def _check_graph(self) -> None:
        """Raise SlowerError if a step is proven to be slower than `worst` before its graph is partitioned, which takes most of
        the time of a trial. Layers that look unlike before they are partitioned may be alike later: then nothing is known."""
        if self.worst == float("inf"):
            return
        with suppress(UnlikeLayersError):
            self._check(least_of_graph(self.graph, self.problem.mesh, self.repeats, are_sent_apart=self._are_sent_apart))

    def _check_promise(self, program: Program) -> None:
        """Raise SlowerError if a step of `program` is proven to be slower than `worst` in any order."""
        if self.worst < float("inf"):
            self._check(least_step(program, are_sent_apart=self._are_sent_apart))

    def _check(self, least: float) -> None:
        if least > self.worst:
            raise SlowerError(least)

    @property
    def _are_sent_apart(self) -> bool:
        overlap = self.problem.options.hiding
        return overlap is None or not overlap.symmetric_memory

    def _ordered(self, program: Program) -> Timeline:
        return run_step(program, self.problem.options, self.worst, effort=self.effort)


def memory_budget_of(problem: Problem, prepared: Prepared) -> MemoryBudget:
    """Return the memory of a device, and how recomputation can extend it, by `Options(recompute=...)`."""
    how, limit = problem.options.recompute, problem.options.memory_bytes(memory_of(problem.mesh))
    if not problem.training or how == "none":
        return MemoryBudget(limit)
    if how == "block":  # recomputed even if memory is ample, so it costs nothing extra
        return MemoryBudget(limit, tuple(replace(step, seconds=0.0) for step in prepared.recomputation))
    return MemoryBudget(limit, prepared.recomputation)


def _prices(program: Program) -> dict[str, float]:
    """Return the seconds of each node of the forward."""
    return {name: task.seconds / len(task.nodes) for task in program.tasks if not task.backward for name in task.nodes}


def program_of_split(split: Split, problem: Problem, repeats: Repeats) -> Program:
    """Return the program of a step with all layers. Raises UnlikeLayersError if the folded layers do not look alike."""
    program = program_of(
        split.forward,
        split.backward,
        problem.mesh,
        outputs=split.outputs,
        gradients=split.gradients,
        optimizer=problem.options.optimizer,
        fused=problem.options.compile == "inductor",
    )
    return unroll(program, repeats)


def fits_surely(problem: Problem) -> bool:
    """Return whether a step fits by a wide margin, so that it need not be simulated to know."""
    gm = problem.captured.graph_module
    total = sum(one.nbytes for node in gm.graph.nodes if node.op != "output" for one in results_of(node))
    copies = max((1 + run.copies for run in repeats_of(gm).runs), default=1)
    return FOLD * total * copies <= problem.options.memory_bytes(memory_of(problem.mesh))
