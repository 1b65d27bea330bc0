"""Issue collectives early and wait for them late, so that kernels overlap with them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.cost.build_program import program_of_graph
from passes.cost.scheduling.best_schedule import memory_cap, schedule
from passes.cost.simulate import Timeline, simulate
from passes.ir.graph import Stage


@dataclass(frozen=True)
class ScheduleOverlap(Pass):
    """Order the calls of a partitioned graph so that communication hides behind compute, as `simulate` predicts it.

    1. Kernels and collectives take the fastest order that `best_schedule` finds within `memory_limit` (bytes
       at the graph's peak; None: 5 % more than in the given order). If the given order exceeds the limit, the peak must not
       grow.
    2. A wait stands before the first call that reads the collective's result. A reduction of gradients keeps its operand
       in memory until its wait, so that wait stands at the first place where it is predicted to cost nothing.
    3. Views stand before the first call that reads them.

    An order that is not predicted to be faster is not used, but waits still move late. `fused` says whether Inductor
    fuses kernels, or each call runs by itself.

    Before:

        mesh dp=2
        stage LOCAL
        %v: f32[4, 8] = parameter("v")
        %w: f32[4, 8] = parameter("w")
        %x: f32[4, 8] = input("x")
        %all_gather_into_tensor: f32[8, 8] = _c10d_functional.all_gather_into_tensor(%v, 2, "autoshard:dp=2:dp")
        %wait_tensor: f32[8, 8] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %mm: f32[4, 8] = mm(%x, %wait_tensor)
        %all_gather_into_tensor_1: f32[8, 8] = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:dp=2:dp")
        %wait_tensor_1: f32[8, 8] = _c10d_functional.wait_tensor(%all_gather_into_tensor_1)
        %mm_1: f32[4, 8] = mm(%mm, %wait_tensor_1)
        return output("0") %mm_1

    After:

        mesh dp=2
        stage SCHEDULED
        %v: f32[4, 8] = parameter("v")
        %w: f32[4, 8] = parameter("w")
        %x: f32[4, 8] = input("x")
        %all_gather_into_tensor: f32[8, 8] = _c10d_functional.all_gather_into_tensor(%v, 2, "autoshard:dp=2:dp")
        %all_gather_into_tensor_1: f32[8, 8] = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:dp=2:dp")
        %wait_tensor: f32[8, 8] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %mm: f32[4, 8] = mm(%x, %wait_tensor)
        %wait_tensor_1: f32[8, 8] = _c10d_functional.wait_tensor(%all_gather_into_tensor_1)
        %mm_1: f32[4, 8] = mm(%mm, %wait_tensor_1)
        return output("0") %mm_1

    Context: ScheduleOverlap(memory_limit=1 << 20)
    """

    name: ClassVar[str] = "schedule_overlap"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.SCHEDULED

    memory_limit: int | None = None
    fused: bool = True

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        mesh = ctx.priced(self, gm)
        given = simulate(ctx.programs.of(gm, mesh, fused=self.fused))
        if not any(task.is_collective for task in given.program.tasks):
            return False
        before = list(gm.graph.nodes)
        best = schedule(given.program, memory_limit=memory_cap(given, self.memory_limit))
        _put(gm, _issue_order(gm, best.timeline))
        found = simulate(program_of_graph(gm, mesh, fused=self.fused))
        if found.step_time > given.step_time:
            _put(gm, before)
            _put(gm, _issue_order(gm, given))
            ctx.remark(
                self,
                before[-1],
                f"left in its order: predicted to take {given.step_time:.3g} s, and {found.step_time:.3g} s in the best found",
            )
        return list(gm.graph.nodes) != before


def _put(gm: GraphModule, order: list[Node]) -> None:
    """Move the nodes of a graph into the given order."""
    end = gm.graph.output_node()
    for node in order:
        if node is not end:
            end.prepend(node)


def _issue_order(gm: GraphModule, timeline: Timeline) -> list[Node]:
    """Return the graph's nodes in the order of a program's tasks, each after its operands and the calls without a
    task."""
    nodes = {node.name: node for node in gm.graph.nodes}
    due = _due(timeline)
    placed = dict.fromkeys(gm.graph.find_nodes(op="placeholder"))
    for turn, task in enumerate(timeline.program.tasks):
        for name in due.get(turn, ()):
            _place(next(iter(nodes[name].users)), placed)
        for name in task.nodes:
            _place(nodes[name], placed)
    for node in gm.graph.nodes:
        _place(node, placed)
    return list(placed)


def _due(timeline: Timeline) -> dict[int, list[str]]:
    """Return the reductions to await, by the number of the task before which each wait stands: the first kernel after
    its end."""
    tasks = timeline.program.tasks
    kernels = [turn for turn, task in enumerate(tasks) if not task.is_collective]
    starts = [timeline.starts[turn] for turn in kernels]
    found: dict[int, list[str]] = {}
    for turn, task in enumerate(tasks):
        if task.is_collective and task.deferrable:
            place = bisect_left(starts, timeline.ends[turn])
            if place < len(kernels):
                found.setdefault(kernels[place], []).append(task.nodes[-1])
    return found


def _place(node: Node, placed: dict[Node, None]) -> None:
    """Append `node` after its operands."""
    stack = [node]
    while stack:
        waiting = [source for source in stack[-1].all_input_nodes if source not in placed]
        if waiting:
            stack += reversed(waiting)
        else:
            placed.setdefault(stack.pop())
