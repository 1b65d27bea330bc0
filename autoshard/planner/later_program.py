"""Make the program of a later call from a few of many equal layers, and from an earlier program of the same model.

Passes take time per layer. A later call differs from an earlier one in sizes only, as a rule: then the passes run on a few
layers, and the earlier program says how the others are joined. Every call of it has to be like one of these few layers, in
all but sizes; where one is not, there is no such program, and the passes run on all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from autoshard.capture.garbage import uncollected
from autoshard.planner.decision import Decision
from autoshard.planner.evaluation import Folded, Recorder, phases_of
from autoshard.planner.problem import Problem
from autoshard.planner.request import EarlierProgram
from autoshard.plans.collectives import Collective
from passes.base import Observer, PassContext, Remark
from passes.ir.folded_layers import Repeats, Run, expand_names
from passes.ir.graph import Origin, copy_graph, is_random, note_of, output_node, repeats_of, set_draw, transfer_of
from passes.ir.more_layers import AllLayers, covered_draws, with_all_layers
from passes.ir.propagation_edges import Edge
from passes.manager import PassManager
from passes.verify import verify


@dataclass(frozen=True)
class Lowered:
    """A per-device program, and what its plan says of it: fields by name, text by stage, the layers that the text lacks."""

    graph: GraphModule
    facts: Mapping[str, Any]
    graphs: Mapping[str, str]
    remarks: tuple[Remark, ...]
    edges: tuple[Edge, ...]
    repeats: tuple[Run, ...] = ()


def numbered_draws(folded: Folded, few: GraphModule, earlier: Iterable[EarlierProgram]) -> Folded | None:
    """Return `folded`, made from `few` layers, with the ordinals that its random calls have in the whole model; None if
    these are not sure.
    """
    drawing = list(filter(is_random, folded.graph.graph.nodes))
    if not drawing:
        return folded
    found = (covered_draws(few, repeats_of(few).runs, one.captured.graph_module) for one in earlier)
    draws = next((one for one in found if one is not None), None)
    if draws is None or len(draws) != len(drawing):
        return None
    for node, draw in zip(drawing, draws, strict=True):
        set_draw(node, draw)
    return folded


@uncollected()
def lowered_by_layers(
    problem: Problem,
    folded: Folded,
    decision: Decision,
    earlier: Iterable[EarlierProgram],
    observers: Sequence[Observer] = (),
) -> Lowered | None:
    """Run the passes on the layers of `folded`; return the program of all layers, or None if no `earlier` one is like it.

    `decision` names the nodes of `folded`. The few layers are verified before and after their shapes are local; all others
    have the calls of these, on values of the same types.
    """
    gm, ctx = copy_graph(folded.graph), PassContext(problem.mesh, unknown_ops=problem.options.unknown_ops)
    phases = phases_of(problem, gm, decision.recipes, decision.solution, decision.recomputation)
    whole = (*phases.place, *phases.make_explicit, *phases.make_collectives)
    local = (*phases.make_local, *phases.rematerialize)
    recorder = Recorder((*whole, *local))
    for passes in (whole, local):
        PassManager(passes, (*observers, recorder)).run(gm, ctx)
        verify(gm, problem.mesh)
    for one in earlier:
        found = with_all_layers(gm, folded.repeats.runs, one.local)
        collectives = None if found is None else _collectives(found, gm, recorder.facts["collectives"], one)
        if found is not None and collectives is not None:
            found.graph.graph.lint()
            return Lowered(
                found.graph,
                _facts(recorder.facts, folded.repeats, problem.captured.parameters) | {"collectives": collectives},
                recorder.graphs,
                (*folded.remarks, *ctx.remarks, _remark(found.graph)),
                tuple(ctx.edges),
                folded.repeats.runs,
            )
    return None


def _facts(found: Mapping[str, Any], repeats: Repeats, parameters: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a folded graph for all layers."""
    values = expand_names(repeats, found["parameters"])
    named = {name: replace(values[name], name=name) for name in parameters}
    return {**found, "parameters": named, "layouts": expand_names(repeats, found["layouts"])}


def _collectives(
    found: AllLayers, few: GraphModule, own: Sequence[Collective], before: EarlierProgram
) -> tuple[Collective, ...] | None:
    """Return the collectives of all layers: those of the earlier program, with the bytes of the few layers; None if they
    are not alike.
    """
    nodes = {node.name: node for node in few.graph.nodes}
    like, notes = dict[str, str](), dict[str, tuple[str, str]]()
    for node, earlier in zip(found.graph.graph.nodes, before.local.graph.nodes, strict=True):
        transfer = transfer_of(node)
        other = transfer_of(nodes[found.covered[node.name]]) if transfer is not None else None
        if transfer is not None and other is not None:
            like.update(zip(transfer.steps, other.steps, strict=False))
            notes |= dict.fromkeys(transfer.steps, (note_of(earlier), note_of(node)))
    by_id = {one.id: one for one in own}
    sent = []
    for one in before.plan.collectives:
        now = by_id.get(like.get(one.id, ""))
        if now is None or (now.kind, now.axes, now.backward, now.recomputed) != (
            *(one.kind, one.axes, one.backward, one.recomputed),
        ):
            return None
        was, note = notes[one.id]
        reason = note if one.reason == was else one.reason
        sent.append(replace(now, id=one.id, origin=one.origin, reason=reason, what=one.what))
    return tuple(sent)


def _remark(gm: GraphModule) -> Remark:
    text = (
        "the passes ran on a few layers; an earlier program, whose graph differs in sizes only, says how all are joined"
    )
    return Remark("fold", text, Origin(), output_node(gm.graph).name, routine=True)
