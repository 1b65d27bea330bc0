"""Predict what `decompose_matmuls` will do to a step when it is compiled: messages sent in chunks.

It takes as long as a simulation, so a search does it for its best candidates only, and for a forward or backward only
if enough time could be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import GraphModule, Node

from autoshard.compile.overlap import OverlapPhase
from autoshard.planner.effort import Effort
from autoshard.planner.prediction import run_step
from autoshard.planner.problem import Problem
from autoshard.planner.recomputation import Trial, program_of_split
from passes.base import Remark
from passes.cost.forward_backward import unchanged
from passes.cost.program import Buffer, Program, Task
from passes.cost.simulate import Timeline
from passes.ir.folded_layers import Repeats
from passes.ir.graph import InputRole, copy_graph, input_of, made_for, origin_of, placeholders, set_origin, set_repeats
from passes.ir.matmul_chunks.sites import sites_in
from passes.matmul_ways.exposure import exposed_by_form


@dataclass(frozen=True)
class Chunking:
    """A simulated program of folded layers with whole messages, and what chunks could save in it."""

    problem: Problem
    repeats: Repeats
    trial: Trial
    effort: Effort

    @property
    def could_save(self) -> float:
        """Return the seconds of a step that chunks could save at most."""
        return sum(self._waits.values())

    @cached_property
    def _waits(self) -> Mapping[bool, float]:
        """Return the seconds that the device waits for messages that can be split, of the forward (False) and the
        backward (True).

        A half that could save less than `Effort.least_chunked` is left out.
        """
        if self._overlap is None or not self._overlap.given.split_matmuls:
            return {}
        timeline, found = self.trial.timeline, dict[bool, float]()
        for backward, gm in self._halves.items():
            own = [(task, seconds) for task, seconds in timeline.exposed_by_task if task.backward is backward]
            found[backward] = sum(exposed_by_form(sites_in(gm), own).values())
        least = self.effort.least_chunked * timeline.step_time
        return {backward: seconds for backward, seconds in found.items() if seconds >= least}

    @property
    def _overlap(self) -> OverlapPhase | None:
        return OverlapPhase.of(self.problem.options, self.problem.mesh)

    @property
    def _halves(self) -> dict[bool, GraphModule]:
        split = self.trial.split
        return {False: split.forward} | ({} if split.backward is None else {True: split.backward})

    def run(self) -> tuple[Timeline, tuple[Remark, ...]]:
        """Return the step with its messages in chunks, and the remarks.

        Raises UnlikeLayersError if equal layers are not split alike.
        """
        split, halves, mode, remarks = self.trial.split, self._halves, self.problem.options.compile, list[Remark]()
        changed = set[bool]()
        for backward in self._waits:
            assert self._overlap is not None
            halves[backward] = layered(halves[backward], split.forward, self.repeats)
            found = self._overlap.cut(split, halves[backward], mode=mode)
            changed |= {backward} if any(not remark.routine for remark in found) else set()
            remarks += found
        if not changed:
            return self.trial.timeline, tuple(remarks)
        cut = replace(split, forward=halves[False], backward=halves.get(True))
        program = _as_named(program_of_split(cut, self.problem, self.repeats), halves)
        known = unchanged(self.trial.program, self.trial.timeline.program, program)
        return run_step(program, self.problem.options, effort=self.effort, known=known), tuple(remarks)


def layered(half: GraphModule, forward: GraphModule, repeats: Repeats) -> GraphModule:
    """Return a copy of a folded forward or backward, annotated with the layers left out.

    Inputs that it gets from the `forward` are annotated with their layers.
    """
    copied, made = copy_graph(half), {node.name: node for node in forward.graph.nodes}
    set_repeats(copied, repeats)
    for node in placeholders(copied.graph, InputRole.SAVED):
        set_origin(node, replace(origin_of(node), fqn=_layer_of(made[input_of(node).name], repeats)))
    return copied


def _layer_of(node: Node, repeats: Repeats) -> str:
    """Return the module of a value, or for a sum between layers, of its latest operand.

    The sum belongs to the module around the layers, and so does not tell its layer itself.
    """
    while not (fqn := origin_of(node).fqn) or any(run.prefix.startswith(f"{fqn}.") for run in repeats.runs):
        calls = [operand for operand in node.all_input_nodes if operand.op == "call_function"]
        if not calls:
            break
        node = max(calls)
    return origin_of(node).fqn


def _as_named(program: Program, halves: Mapping[bool, GraphModule]) -> Program:
    """Rename chunks in a program to the calls that they replace, since the plan has those."""
    names = {(backward, node.name): made_for(node) for backward, gm in halves.items() for node in gm.graph.nodes}
    tasks, buffers = list[Task](), list[Buffer]()
    for task in program.tasks:
        nodes = tuple(dict.fromkeys(names.get((task.backward, name), name) for name in task.nodes))
        tasks.append(task if nodes == task.nodes else replace(task, nodes=nodes))
    for buffer in program.buffers:
        node = names.get((buffer.backward, buffer.node), buffer.node)
        buffers.append(buffer if node == buffer.node else replace(buffer, node=node))
    return replace(program, tasks=tuple(tasks), buffers=tuple(buffers))
