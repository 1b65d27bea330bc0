"""Try the ways in which a collective and its matrix products can run, by scheduling each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from passes.cost.build_program import program_of_graph
from passes.cost.collective_time import link_of
from passes.cost.program import Program
from passes.cost.scheduling.best_schedule import bucketed, schedule
from passes.cost.scheduling.bucketing import sizes
from passes.cost.simulate import Timeline
from passes.cost.unroll import unroll
from passes.ir.graph import repeats_of
from passes.ir.matmul_chunks.excerpt import excerpt
from passes.ir.matmul_chunks.one_operator import make_one, why_not_one
from passes.ir.matmul_chunks.sites import Site, sites_in, split
from passes.ir.mesh import Mesh
from passes.ir.units import format_seconds

COUNTS = (2, 4, 8)  # numbers of chunks to try: each doubling halves what stays exposed and doubles launches and latency
WHOLE, ONE = 1, 0  # the other ways: unchanged, or one operator of collective and products
WORTH = 0.002  # fraction of the time that splitting one form of products must save: less is within the model's error


def is_worth(saved: float, whole: float) -> bool:
    """Return whether the `saved` seconds of `whole` seconds are more than the model's error."""
    return saved >= WORTH * whole


@dataclass(frozen=True)
class Choice:
    """A decision for the sites of a form, with its reason."""

    way: int | None  # a number of chunks, or `ONE`; None: whole
    reason: str


@dataclass(frozen=True)
class Trials:
    """Trials of ways on one mesh; `fused`, `symmetric_memory` and `bucket_bytes` are as in `DecomposeMatmuls`."""

    mesh: Mesh
    fused: bool
    symmetric_memory: bool
    by: str  # the pass that new calls are noted with
    bucket_bytes: int

    def choice(self, site: Site, calls: list[Node], found: dict[object, Choice]) -> Choice:
        """Return the choice for the sites of a form, by scheduling one and the `calls` around it, with the choices `found`."""
        ways, reason = self.ways(site)
        if not ways:
            return Choice(None, reason)
        part = self._tried(calls, found)
        whole = self.scheduled(part).step_time
        times = {}
        for way, one in zip(ways, (part, *(self._tried(calls, found) for _ in ways[1:])), strict=True):
            self.change(one, {site.form: Choice(way, "")})
            times[way] = self.scheduled(one).step_time
        best = min(ways, key=times.__getitem__)
        saved = whole - times[best]
        verb = "saves" if best == ONE else "save"
        reason = f"{_named(best)} {verb} {format_seconds(max(0.0, saved))} of {format_seconds(whole)} around it"
        return Choice(best if is_worth(saved, whole) else None, reason + self._why_not_one(site))

    def ways(self, site: Site) -> tuple[tuple[int, ...], str]:
        """Return the fastest number of chunks for a site alone, and `ONE`, each if faster than the whole, and the
        reason to give if neither is."""
        cuts = [count for count in COUNTS if site.cut(count) is not None]
        why_not = self._why_not_one(site)
        ones = [ONE] if self.symmetric_memory and not why_not else []
        if not cuts and not ones:
            return (), f"its {site.rows.before} x {site.rows.after} rows are not divided by {COUNTS[0]}{why_not}"
        times = {}
        for way in (WHOLE, *cuts, *ones):
            part = excerpt(_calls(site))
            _change(sites_in(part)[0], way, self.by)
            times[way] = self.scheduled(part).step_time
        tried = [min(cuts, key=times.__getitem__), *ones] if cuts else ones
        others = ", ".join(f"{format_seconds(times[way])} in {_named(way)}" for way in tried)
        reason = f"{format_seconds(times[WHOLE])} by itself, {others}{why_not}"
        return tuple(way for way in tried if times[way] < times[WHOLE]), reason

    def _why_not_one(self, site: Site) -> str:
        """Return why a site cannot be one operator on these ranks; empty if it can, or if `symmetric_memory` is off."""
        hardware = self.mesh.hardware
        assert hardware is not None
        group = self.mesh.group_shape(self.mesh.axes_of_group(str(site.collective.args[-1])))
        why = why_not_one(site)
        if link_of(group) != "inside" or not hardware.inside.joins_memory:
            link = hardware.inside if link_of(group) == "inside" else hardware.across
            why = f"ranks joined by {link.name} share no memory"
        return f"; no operator: {why}" if self.symmetric_memory and why else ""

    def scheduled(self, gm: GraphModule) -> Timeline:
        """Return the timeline of a part of a graph in its best order."""
        return schedule(self.program(gm)).timeline

    def bucketed(self, program: Program, cap: int) -> Timeline:
        """Return the timeline of a whole graph in its best buckets and order, within `cap` bytes."""
        if not self.bucket_bytes:
            return schedule(program, memory_limit=cap).timeline
        return bucketed(program, sizes(self.bucket_bytes)[1:], memory_limit=cap)[1].timeline

    def program(self, gm: GraphModule) -> Program:
        """Return the program of all layers, also if `gm` is folded."""
        return unroll(program_of_graph(gm, self.mesh, fused=self.fused), repeats_of(gm))

    def _tried(self, calls: list[Node], chosen: Mapping[object, Choice]) -> GraphModule:
        part = excerpt(calls)
        self.change(part, chosen)
        return part

    def change(self, gm: GraphModule, chosen: Mapping[object, Choice]) -> None:
        """Change the sites of a graph as chosen for their forms."""
        ways = {form: choice.way for form, choice in chosen.items() if choice.way is not None}
        for form, way in ways.items():
            for site in sites_in(gm):
                if site.form == form:
                    _change(site, way, self.by)


def _change(site: Site, way: int, by: str) -> None:
    """Split a site into chunks, or make it one operator, if that is possible."""
    if way == ONE:
        if not why_not_one(site):
            make_one(site, by)
    elif way > 1 and (cut := site.cut(way)) is not None:
        split(site, cut, by)


def _named(way: int) -> str:
    return "one operator" if way == ONE else f"{way} chunks"


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
