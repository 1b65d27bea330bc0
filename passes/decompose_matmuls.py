"""Tensor parallelism's messages are sent in chunks, beside the products that read or make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import module_of
from passes.base import Pass, PassContext
from passes.cost.from_graph import program_of_graph
from passes.cost.schedule import memory_cap, schedule
from passes.cost.simulate import Timeline, simulate
from passes.ir.chunks import Site, sites_in, split
from passes.ir.graph import (
    Input,
    InputRole,
    Output,
    OutputRole,
    Stage,
    copy_graph,
    set_input,
    set_outputs,
)
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes, format_seconds

COUNTS = (2, 4, 8)  # chunks that are tried
WORTH = 0.002  # part of the graph's time that cutting one form of products must save: more kernels, more that can go wrong


@dataclass(frozen=True)
class DecomposeMatmuls(Pass):
    """Cut a gather and the products that read it, or products and the reduce-scatter of their sum, into chunks of rows.

    1. `mm(all_gather(x), w)` becomes gathers of chunks of `x`, a product of each, and the results put together in
       the order of rows that they had. What else reads the gathered value is given the chunks put together.
    2. `reduce_scatter(mm(x, w))`, or an all-reduce, or of a sum of products, becomes products of chunks of `x`, each
       reduced, and the results put together.

    Sites of one form (shapes, group, dtype) are cut alike, into the number of chunks that is fastest for one by itself,
    and only where `simulate` of the scheduled graph says that all of them together are worth it within `memory_limit`
    (bytes at the graph's peak; None: a twentieth more than as it is given). `fused`: as for `schedule_overlap`.

    Before:

        mesh tp=2
        stage LOCAL
        %x: bf16[2048, 4096] = input("x")
        %w: bf16[4096, 1024] = parameter("w")
        %gather: bf16[4096, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, "autoshard:tp=2:tp")
        %whole: bf16[4096, 4096] = _c10d_functional.wait_tensor(%gather)
        %mm: bf16[4096, 1024] = mm(%whole, %w)
        return output("0") %mm

    After:

        mesh tp=2
        stage LOCAL
        %x: bf16[2048, 4096] = input("x")
        %w: bf16[4096, 1024] = parameter("w")
        %slice_1: bf16[1024, 4096] = slice.Tensor(%x, 0, 0, 1024)
        %slice_2: bf16[1024, 4096] = slice.Tensor(%x, 0, 1024, 2048)
        %all_gather_into_tensor: bf16[2048, 4096] = _c10d_functional.all_gather_into_tensor(%slice_1, 2, "autoshard:tp=2:tp")      # | decompose_matmuls: part 1 of 2
        %wait_tensor: bf16[2048, 4096] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %all_gather_into_tensor_1: bf16[2048, 4096] = _c10d_functional.all_gather_into_tensor(%slice_2, 2, "autoshard:tp=2:tp")      # | decompose_matmuls: part 2 of 2
        %wait_tensor_1: bf16[2048, 4096] = _c10d_functional.wait_tensor(%all_gather_into_tensor_1)
        %mm_1: bf16[2048, 1024] = mm(%wait_tensor, %w)
        %mm_2: bf16[2048, 1024] = mm(%wait_tensor_1, %w)
        %view: bf16[1, 2, 1024, 1024] = view(%mm_1, [1, 2, 1024, 1024])
        %view_1: bf16[1, 2, 1024, 1024] = view(%mm_2, [1, 2, 1024, 1024])
        %cat: bf16[1, 2, 2048, 1024] = cat([%view, %view_1], 2)
        %view_2: bf16[4096, 1024] = view(%cat, [4096, 1024])
        return output("0") %view_2

    Context: DecomposeMatmuls(), mesh=Mesh("tp=2", hardware="h100")
    """  # noqa: E501

    name: ClassVar[str] = "decompose_matmuls"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    memory_limit: int | None = None
    fused: bool = True

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        sites = sites_in(gm)
        if not sites:
            return False
        if ctx.mesh.hardware is None:
            ctx.remark(self, sites[0].collective, "left whole: the figures of this device are not known", routine=True)
            return False
        program = program_of_graph(gm, ctx.mesh, fused=self.fused)
        cap = memory_cap(simulate(program), self.memory_limit)
        best, timeline = gm, schedule(program, memory_limit=cap).timeline
        chosen: dict[object, int] = {}
        for form, alike in _by_form(sites).items():
            count, told = self._count(alike, timeline, ctx.mesh)
            if count > 1:
                tried = copy_graph(best)
                self._split(tried, {form: count})
                found = self._scheduled(tried, ctx.mesh, cap)
                saved = timeline.step_time - found.step_time
                told = f"{count} chunks save {format_seconds(max(0.0, saved))} of {format_seconds(timeline.step_time)}"
                if found.peak_memory > cap:
                    told = f"{count} chunks take {format_bytes(found.peak_memory)} at the peak, over {format_bytes(cap)}"
                elif saved >= WORTH * timeline.step_time:
                    chosen[form], best, timeline = count, tried, found
            self._tell(alike, told, ctx, is_split=form in chosen)
        self._split(gm, chosen)
        return bool(chosen)

    def _scheduled(self, gm: GraphModule, mesh: Mesh, cap: int | None = None) -> Timeline:
        return schedule(program_of_graph(gm, mesh, fused=self.fused), memory_limit=cap).timeline

    def _count(self, alike: list[Site], timeline: Timeline, mesh: Mesh) -> tuple[int, str]:
        """The number of chunks that is fastest for a site by itself, and what is said where that is 1."""
        site, exposed = alike[0], _exposed(alike, timeline)
        if exposed < WORTH * timeline.step_time:
            return 1, f"all but {format_seconds(exposed)} of {format_seconds(timeline.step_time)} is hidden"
        cuts = {count: cut for count in COUNTS if (cut := site.cut(count)) is not None}
        if not cuts:
            return 1, f"its {site.rows.before} x {site.rows.behind} rows are not divided by {COUNTS[0]}"
        times = {1: self._scheduled(_alone(site), mesh).step_time}
        for count, cut in cuts.items():
            gm = _alone(site)
            split(sites_in(gm)[0], cut, self.name)
            times[count] = self._scheduled(gm, mesh).step_time
        best = min(times, key=lambda count: (times[count], count))
        nearest = min(cuts, key=lambda count: (times[count], count))
        return best, f"{format_seconds(times[1])} by itself, {format_seconds(times[nearest])} in {nearest} chunks"

    def _split(self, gm: GraphModule, chosen: dict[object, int]) -> None:
        for form, count in chosen.items():
            for site in sites_in(gm):
                if site.form == form and (cut := site.cut(count)) is not None:
                    split(site, cut, self.name)

    def _tell(self, alike: list[Site], told: str, ctx: PassContext, *, is_split: bool) -> None:
        others = f", with {len(alike) - 1} like it" if len(alike) > 1 else ""
        how = "split" if is_split else "left whole"
        ctx.remark(self, alike[0].collective, f"{how}{others}: {told}", routine=not is_split)


def _by_form(sites: list[Site]) -> dict[object, list[Site]]:
    found: dict[object, list[Site]] = {}
    for site in sites:
        found.setdefault(site.form, []).append(site)
    return found


def _exposed(sites: list[Site], timeline: Timeline) -> float:
    """Seconds of a timeline in which the device waits for the collectives of `sites`."""
    names = {site.collective.name for site in sites}
    return sum(seconds for task, seconds in timeline.exposed_by_task if not names.isdisjoint(task.nodes))


def _alone(site: Site) -> GraphModule:
    """A graph of a site and nothing else."""
    wait = next(iter(site.collective.users))
    ends = [wait] if not site.is_gather else [*site.products, *([site.joined] if site.kept else [])]
    inside, given = _between(site, ends)
    graph, copies = Graph(), dict[Node, Node]()
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        set_input(copies[node], Input(InputRole.INPUT, node.name))
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[end] for end in ends))
    set_outputs(graph, tuple(Output(OutputRole.OUTPUT, end.name) for end in ends))
    return module_of(graph, torch.nn.Module())


def _between(site: Site, ends: list[Node]) -> tuple[list[Node], list[Node]]:
    """The calls of a site, and what they read of other calls, both in program order."""
    inside, given, queue = set[Node](), set[Node](), list(ends)
    while queue:
        node = queue.pop()
        inside.add(node)
        is_first = node is site.collective if site.is_gather else node in site.products
        sources = [value for value in node.all_input_nodes if value not in inside]
        reads = site.is_gather and node in site.products
        beside = [value for value in sources if is_first or (reads and value is not site.joined)]
        given.update(beside)
        queue += [value for value in sources if value not in beside]
    return sorted(inside), sorted(given - inside)
