"""Split collectives of tensor parallelism into chunks that overlap with the matrix products that read or write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.cost.scheduling.best_schedule import memory_cap
from passes.cost.simulate import Timeline, simulate
from passes.ir.graph import Stage, copy_graph, origin_of, repeats_of
from passes.ir.matmul_chunks.sites import Site, sites_in
from passes.ir.units import format_bytes, format_seconds
from passes.matmul_ways.exposure import exposed_by_form
from passes.matmul_ways.trials import ONE, Choice, Trials, is_worth

REACH = 16  # sites on either side that a site is scheduled with: about as many as a transformer layer has


@dataclass(frozen=True)
class DecomposeMatmuls(Pass):
    """Cut a gather and the products that read it, or products and the reduce-scatter of their sum, into chunks of rows.

    1. `mm(all_gather(x), w)` becomes gathers of chunks of `x`, a product of each, and the results concatenated in the
       original order of rows. Other readers of the gathered value, such as the backward, get the concatenated chunks. If each
       chunk is whole sequences of a batch, Inductor lets the products write their rows of the result themselves; otherwise
       concatenating copies them.
    2. `reduce_scatter(mm(x, w))`, also an all-reduce, also of a sum of products, becomes products of chunks of `x`, each
       reduced, and the results concatenated.
    3. With `symmetric_memory`, if the ranks of the group can read each other's memory, a gather and the products that read
       it, or a product and its reduce-scatter, can also become one operator, which sends the rows of one rank while it
       multiplies those of another (`passes/cost/pipelined_matmul_time.py`).

    Sites of one form (shapes, group, dtype) are treated alike: split into the number of chunks that is fastest for one by
    itself, or made one operator, whichever is faster. They are changed only if the simulator predicts a gain three times:
    the device waits for them in the scheduled graph; the part of the graph around one of them, scheduled by itself, gets
    faster; and so does the scheduled graph with all changes, within `memory_limit` (bytes at the graph's peak; None: 5 %
    more than in the given order), with other messages in buckets of at most `bucket_bytes`. In a folded graph the decision holds
    for all layers. `fused`: as for `schedule_overlap`.

    Before:

        mesh tp=2
        stage LOCAL
        %x: bf16[8192, 4096] = input("x")
        %w: bf16[4096, 64] = parameter("w")
        %gather: bf16[16384, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, "autoshard:tp=2:tp")
        %whole: bf16[16384, 4096] = _c10d_functional.wait_tensor(%gather)
        %mm: bf16[16384, 64] = mm(%whole, %w)
        return output("0") %mm

    After:

        mesh tp=2
        stage LOCAL
        %x: bf16[8192, 4096] = input("x")
        %w: bf16[4096, 64] = parameter("w")
        %slice_1: bf16[4096, 4096] = slice.Tensor(%x, 0, 0, 4096)
        %slice_2: bf16[4096, 4096] = slice.Tensor(%x, 0, 4096, 8192)
        %all_gather_into_tensor: bf16[8192, 4096] = _c10d_functional.all_gather_into_tensor(%slice_1, 2, "autoshard:tp=2:tp")      # | decompose_matmuls: part 1 of 2
        %wait_tensor: bf16[8192, 4096] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %all_gather_into_tensor_1: bf16[8192, 4096] = _c10d_functional.all_gather_into_tensor(%slice_2, 2, "autoshard:tp=2:tp")      # | decompose_matmuls: part 2 of 2
        %wait_tensor_1: bf16[8192, 4096] = _c10d_functional.wait_tensor(%all_gather_into_tensor_1)
        %mm_1: bf16[8192, 64] = mm(%wait_tensor, %w)
        %mm_2: bf16[8192, 64] = mm(%wait_tensor_1, %w)
        %view: bf16[1, 2, 4096, 64] = view(%mm_1, [1, 2, 4096, 64])
        %view_1: bf16[1, 2, 4096, 64] = view(%mm_2, [1, 2, 4096, 64])
        %cat: bf16[1, 2, 8192, 64] = cat([%view, %view_1], 2)
        %view_2: bf16[16384, 64] = view(%cat, [16384, 64])
        return output("0") %view_2

    Context: DecomposeMatmuls(), mesh=Mesh("tp=2", hardware="h100")
    """  # noqa: E501

    name: ClassVar[str] = "decompose_matmuls"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    memory_limit: int | None = None
    fused: bool = True
    symmetric_memory: bool = False
    bucket_bytes: int = 0

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        sites = sites_in(gm)
        if not sites:
            return False
        if ctx.mesh.hardware is None:
            ctx.remark(self, sites[0].collective, "left whole: the figures of this device are not known", routine=True)
            return False
        trials = Trials(ctx.mesh, self.fused, self.symmetric_memory, self.name, self.bucket_bytes)
        program = trials.program(gm)
        cap = memory_cap(simulate(program), self.memory_limit)
        whole = trials.bucketed(program, cap)
        forms, found = _by_form(sites), _choices(gm, sites, whole, trials)
        firsts = {form: sites[numbers[0]].collective for form, numbers in forms.items()}
        counts = {form: sum(_count(gm, sites[number]) for number in numbers) for form, numbers in forms.items()}
        chosen = {form: choice for form, choice in found.items() if choice.way is not None}
        refused = _apply(gm, chosen, whole, cap, trials) if chosen else ""
        for form, choice in found.items():
            reason = refused if form in chosen and refused else choice.reason
            others = f", with {counts[form] - 1} like it" if counts[form] > 1 else ""
            is_changed = form in chosen and not refused
            how = "left whole" if not is_changed else "joined" if choice.way == ONE else "split"
            ctx.remark(self, firsts[form], f"{how}{others}: {reason}", routine=not is_changed)
        return bool(chosen) and not refused


def _choices(gm: GraphModule, sites: list[Site], whole: Timeline, trials: Trials) -> dict[object, Choice]:
    """Return the choice for the sites of each form; `whole` is the timeline of the unchanged graph."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    places = {node: place for place, node in enumerate(calls)}
    found: dict[object, Choice] = {}
    exposed = exposed_by_form(sites, whole.exposed_by_task)
    for form, numbers in _by_form(sites).items():
        if not is_worth(exposed[form], whole.step_time):
            reason = f"{format_seconds(exposed[form])} of a step of {format_seconds(whole.step_time)} is exposed"
            found[form] = Choice(None, reason)
            continue
        start, end = _around(numbers, sites, places)
        found[form] = trials.choice(sites[numbers[0]], calls[start:end], found)
    return found


def _apply(gm: GraphModule, chosen: dict[object, Choice], before: Timeline, cap: int, trials: Trials) -> str:
    """Apply the choices; undo them and return the reason if the result is no faster than `before` or takes too much
    memory."""
    whole = copy_graph(gm)
    trials.change(gm, chosen)
    after = trials.bucketed(trials.program(gm), cap)
    refused = ""
    if after.peak_memory > cap:
        refused = f"{format_bytes(after.peak_memory)} at the peak, over {format_bytes(cap)}"
    elif not is_worth(before.step_time - after.step_time, before.step_time):
        refused = f"{format_seconds(after.step_time)}, of {format_seconds(before.step_time)} as it is"
    if refused:
        gm.graph = whole.graph
        return f"all that are worth it in parts take {refused}"
    return ""


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
