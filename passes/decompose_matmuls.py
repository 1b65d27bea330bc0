"""Split collectives of tensor parallelism into chunks that overlap with the matrix products that read or write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.cost.build_program import program_of_graph
from passes.cost.collective_time import link_of
from passes.cost.program import Program, Task
from passes.cost.scheduling.best_schedule import memory_cap, schedule
from passes.cost.simulate import Timeline, simulate
from passes.cost.unroll import unroll
from passes.ir.graph import Stage, copy_graph, origin_of, repeats_of
from passes.ir.matmul_chunks.excerpt import excerpt
from passes.ir.matmul_chunks.one_operator import make_one, why_not_one
from passes.ir.matmul_chunks.sites import Site, sites_in, split
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes, format_seconds

COUNTS = (2, 4, 8)  # numbers of chunks to try: each doubling halves what stays exposed and doubles launches and latency
WHOLE, ONE = 1, 0  # the other ways: unchanged, or one operator of collective and products
REACH = 16  # sites on either side that a site is scheduled with: about as many as a transformer layer has
WORTH = 0.002  # fraction of the time that splitting one form of products must save: less is within the model's error


@dataclass(frozen=True)
class DecomposeMatmuls(Pass):
    """Cut a gather and the products that read it, or products and the reduce-scatter of their sum, into chunks of rows.

    1. `mm(all_gather(x), w)` becomes gathers of chunks of `x`, a product of each, and the results concatenated in the
       original order of rows. Other readers of the gathered value get the concatenated chunks.
    2. `reduce_scatter(mm(x, w))`, also an all-reduce, also of a sum of products, becomes products of chunks of `x`, each
       reduced, and the results concatenated.
    3. With `symmetric_memory`, if the ranks of the group can read each other's memory, a gather and the products that read
       it, or a product and its reduce-scatter, can also become one operator, which sends the rows of one rank while it
       multiplies those of another (`passes/cost/pipelined_matmul_time.py`).

    Sites of one form (shapes, group, dtype) are treated alike: split into the number of chunks that is fastest for one by
    itself, or made one operator, whichever is faster. They are changed only if the simulator predicts a gain three times:
    the device waits for them in the scheduled graph; the part of the graph around one of them, scheduled by itself, gets
    faster; and so does the scheduled graph with all changes, within `memory_limit` (bytes at the graph's peak; None: 5 %
    more than in the given order). In a folded graph the decision holds for all layers. `fused`: as for `schedule_overlap`.

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
    symmetric_memory: bool = False

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        sites = sites_in(gm)
        if not sites:
            return False
        if ctx.mesh.hardware is None:
            ctx.remark(self, sites[0].collective, "left whole: the figures of this device are not known", routine=True)
            return False
        program = self._program(gm, ctx.mesh)
        cap = memory_cap(simulate(program), self.memory_limit)
        whole = schedule(program, memory_limit=cap).timeline
        forms, found = _by_form(sites), self._choices(gm, sites, whole, ctx.mesh)
        firsts = {form: sites[numbers[0]].collective for form, numbers in forms.items()}
        counts = {form: sum(_count(gm, sites[number]) for number in numbers) for form, numbers in forms.items()}
        chosen = {form: choice for form, choice in found.items() if choice.way is not None}
        refused = self._apply(gm, chosen, whole, cap, ctx.mesh) if chosen else ""
        for form, choice in found.items():
            reason = refused if form in chosen and refused else choice.reason
            others = f", with {counts[form] - 1} like it" if counts[form] > 1 else ""
            is_changed = form in chosen and not refused
            how = "left whole" if not is_changed else "joined" if choice.way == ONE else "split"
            ctx.remark(self, firsts[form], f"{how}{others}: {reason}", routine=not is_changed)
        return bool(chosen) and not refused

    def _choices(self, gm: GraphModule, sites: list[Site], whole: Timeline, mesh: Mesh) -> dict[object, _Choice]:
        """Return the choice for the sites of each form; `whole` is the timeline of the unchanged graph."""
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        places = {node: place for place, node in enumerate(calls)}
        found: dict[object, _Choice] = {}
        exposed = exposed_by_form(sites, whole.exposed_by_task)
        for form, numbers in _by_form(sites).items():
            if exposed[form] < WORTH * whole.step_time:
                reason = f"all but {format_seconds(exposed[form])} of {format_seconds(whole.step_time)} is hidden"
                found[form] = _Choice(None, reason)
                continue
            start, end = _around(numbers, sites, places)
            found[form] = self._choice(sites[numbers[0]], calls[start:end], found, mesh)
        return found

    def _choice(self, site: Site, calls: list[Node], found: dict[object, _Choice], mesh: Mesh) -> _Choice:
        """Return the choice for the sites of a form, by scheduling one and the `calls` around it, with the choices `found`."""
        ways, reason = self._ways(site, mesh)
        if not ways:
            return _Choice(None, reason)
        part = self._tried(calls, found)
        whole = self._scheduled(part, mesh).step_time
        times = {}
        for way, one in zip(ways, (part, *(self._tried(calls, found) for _ in ways[1:])), strict=True):
            self._change(one, {site.form: _Choice(way, "")})
            times[way] = self._scheduled(one, mesh).step_time
        best = min(ways, key=times.__getitem__)
        saved = whole - times[best]
        verb = "saves" if best == ONE else "save"
        reason = f"{_named(best)} {verb} {format_seconds(max(0.0, saved))} of {format_seconds(whole)} around it"
        return _Choice(best if saved >= WORTH * whole else None, reason + self._why_not_one(site, mesh))

    def _ways(self, site: Site, mesh: Mesh) -> tuple[tuple[int, ...], str]:
        """Return the fastest number of chunks for a site alone, and `ONE`, each if faster than the whole, and the
        reason to give if neither is."""
        cuts = [count for count in COUNTS if site.cut(count) is not None]
        why_not = self._why_not_one(site, mesh)
        ones = [ONE] if self.symmetric_memory and not why_not else []
        if not cuts and not ones:
            return (), f"its {site.rows.before} x {site.rows.after} rows are not divided by {COUNTS[0]}{why_not}"
        times = {}
        for way in (WHOLE, *cuts, *ones):
            part = excerpt(_calls(site))
            _change(sites_in(part)[0], way, self.name)
            times[way] = self._scheduled(part, mesh).step_time
        tried = [min(cuts, key=times.__getitem__), *ones] if cuts else ones
        others = ", ".join(f"{format_seconds(times[way])} in {_named(way)}" for way in tried)
        reason = f"{format_seconds(times[WHOLE])} by itself, {others}{why_not}"
        return tuple(way for way in tried if times[way] < times[WHOLE]), reason

    def _why_not_one(self, site: Site, mesh: Mesh) -> str:
        """Return why a site cannot be one operator on these ranks; empty if it can, or if `symmetric_memory` is off."""
        assert mesh.hardware is not None
        group = mesh.group_shape(mesh.axes_of_group(str(site.collective.args[-1])))
        why = why_not_one(site)
        if link_of(group) != "inside" or not mesh.hardware.inside.joins_memory:
            link = mesh.hardware.inside if link_of(group) == "inside" else mesh.hardware.across
            why = f"ranks joined by {link.name} share no memory"
        return f"; no operator: {why}" if self.symmetric_memory and why else ""

    def _apply(self, gm: GraphModule, chosen: dict[object, _Choice], before: Timeline, cap: int, mesh: Mesh) -> str:
        """Apply the choices; undo them and return the reason if the result is no faster than `before` or takes too much
        memory."""
        whole = copy_graph(gm)
        self._change(gm, chosen)
        after = self._scheduled(gm, mesh, cap)
        refused = ""
        if after.peak_memory > cap:
            refused = f"{format_bytes(after.peak_memory)} at the peak, over {format_bytes(cap)}"
        elif after.step_time > (1 - WORTH) * before.step_time:
            refused = f"{format_seconds(after.step_time)}, of {format_seconds(before.step_time)} as it is"
        if refused:
            gm.graph = whole.graph
            return f"all that are worth it in parts take {refused}"
        return ""

    def _scheduled(self, gm: GraphModule, mesh: Mesh, cap: int | None = None) -> Timeline:
        return schedule(self._program(gm, mesh), memory_limit=cap).timeline

    def _program(self, gm: GraphModule, mesh: Mesh) -> Program:
        """Return the program of all layers, also if `gm` is folded."""
        return unroll(program_of_graph(gm, mesh, fused=self.fused), repeats_of(gm))

    def _tried(self, calls: list[Node], chosen: Mapping[object, _Choice]) -> GraphModule:
        part = excerpt(calls)
        self._change(part, chosen)
        return part

    def _change(self, gm: GraphModule, chosen: Mapping[object, _Choice]) -> None:
        ways = {form: choice.way for form, choice in chosen.items() if choice.way is not None}
        for form, way in ways.items():
            for site in sites_in(gm):
                if site.form == form:
                    _change(site, way, self.name)


def exposed_by_form(sites: Sequence[Site], exposed: Iterable[tuple[Task, float]]) -> dict[object, float]:
    """Return, by form, the `exposed` seconds of a step's tasks that chunks could hide.

    Of the messages that nothing waits for, only the one with the longest exposed time counts: the others queue for
    their link, and would do so in chunks.
    """
    forms: dict[str, object] = {site.collective.name: site.form for site in sites}
    found, late = dict.fromkeys(forms.values(), 0.0), list[tuple[float, object]]()
    for task, seconds in exposed:
        for form in {forms[name] for name in task.nodes if name in forms}:
            if task.deferrable:
                late.append((seconds, form))
            else:
                found[form] += seconds
    if late:
        longest, form = max(late, key=lambda one: one[0])
        found[form] += longest
    return found


@dataclass(frozen=True)
class _Choice:
    """A decision for the sites of a form, with its reason."""

    way: int | None  # a number of chunks, or `ONE`; None: whole
    reason: str


def _change(site: Site, way: int, by: str) -> None:
    """Split a site into chunks, or make it one operator, if that is possible."""
    if way == ONE:
        if not why_not_one(site):
            make_one(site, by)
    elif way > 1 and (cut := site.cut(way)) is not None:
        split(site, cut, by)


def _named(way: int) -> str:
    return "one operator" if way == ONE else f"{way} chunks"


def _by_form(sites: list[Site]) -> dict[object, list[int]]:
    """Return the numbers of the sites of each form."""
    found: dict[object, list[int]] = {}
    for number, site in enumerate(sites):
        found.setdefault(site.form, []).append(number)
    return found


def _count(gm: GraphModule, site: Site) -> int:
    """Return the number of sites that one stands for if `gm` is folded."""
    return repeats_of(gm).count(origin_of(site.collective).fqn)


def _around(alike: list[int], sites: list[Site], places: dict[Node, int]) -> tuple[int, int]:
    """Return the range of calls around the middle one of the sites `alike`: from the site of its form before it to the one
    after it, at most `REACH` sites of any form to either side."""
    middle = len(alike) // 2
    here = alike[middle]
    first = max(here - REACH, alike[middle - 1] if middle else 0)
    last = min(here + REACH, alike[middle + 1] if middle + 1 < len(alike) else len(sites))
    start = _place(sites[first], places) if first > 0 else 0
    return start, _place(sites[last], places) if last < len(sites) else len(places)


def _place(site: Site, places: dict[Node, int]) -> int:
    return min(places[node] for node in (site.collective, *site.products))


def _calls(site: Site) -> list[Node]:
    """Return the calls of a site, in program order."""
    wait = next(iter(site.collective.users))
    inside, queue = set[Node](), [wait] if not site.is_gather else [*site.products, site.joined]
    while queue:
        node = queue.pop()
        inside.add(node)
        if node is site.collective if site.is_gather else node in site.products:
            continue
        is_reader = site.is_gather and node in site.products
        queue += [site.joined] if is_reader else [value for value in node.all_input_nodes if value not in inside]
    return sorted(inside)
