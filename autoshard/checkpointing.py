"""What of the forward is computed again in the backward: as options say, or as little as makes a step fit."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from autoshard.compile import Split, split_program
from autoshard.prediction import run_step
from autoshard.problem import Problem
from passes.base import PassContext
from passes.checkpoint import Checkpoint
from passes.cost.from_graph import program_of
from passes.cost.program import Program
from passes.cost.simulate import Timeline
from passes.cost.unroll import unroll
from passes.ir.graph import copy_graph, saving_of
from passes.ir.plan import Recomputation
from passes.ir.repeats import Repeats
from passes.manager import PassManager

Kept = tuple[str, ...] | None  # kinds of values that blocks keep; None: nothing is computed again


@dataclass(frozen=True)
class Trial:
    """A per-device program with something kept, and how its step runs."""

    kept: Kept
    split: Split
    program: Program
    timeline: Timeline

    @property
    def recomputation(self) -> Recomputation | None:
        """What the backward computes again, for the plan."""
        if self.kept is None or self.split.backward is None:
            return None
        graph = self.split.backward.graph
        remade = {node.name for node in graph.nodes if node.op == "call_function" and saving_of(node) == "remade"}
        tasks = [task for task in self.program.tasks if task.backward and task.nodes and remade.issuperset(task.nodes)]
        return Recomputation(
            self.kept,
            sum(task.seconds for task in tasks if not task.is_collective),
            sum(task.seconds for task in tasks if task.is_collective),
        )


def try_kept(problem: Problem, repeats: Repeats, gm: GraphModule, kept: Kept) -> Trial:
    """Simulate a step of a LOCAL graph, whose layers that are left out are put in again; `gm` is left as it is."""
    if kept is not None:
        gm = copy_graph(gm)
        PassManager((Checkpoint(kept),)).run(gm, PassContext(problem.mesh))
    split = split_program(gm, mode="eager")
    program = program_of(
        split.forward,
        split.backward,
        problem.mesh,
        outputs=split.outputs,
        gradients=split.gradients,
        optimizer=problem.options.optimizer,
    )
    program = unroll(program, repeats)
    return Trial(kept, split, program, run_step(program, problem.options))


def settle(problem: Problem, repeats: Repeats, gm: GraphModule) -> Trial:
    """The program that `Options(checkpoint=...)` asks for."""
    return try_kept(problem, repeats, gm, () if problem.options.checkpoint == "block" else None)
