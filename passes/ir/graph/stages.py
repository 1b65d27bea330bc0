"""The stages of a graph, and facts of a whole graph: one record under one key of `gm.meta`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import cast

from torch.fx import GraphModule

from passes.ir.folded_layers import Repeats
from passes.ir.graph.facts import KEY


class Stage(enum.IntEnum):
    """A set of facts that hold for a graph; each stage includes those before it, up to LOCAL."""

    CAPTURED = 0  # single-device ATen graph, global shapes
    PLACED = 1  # every tensor value has a layout, every operand a needed layout
    EXPLICIT = 2  # every operand has the layout that its user needs: disagreements are reshard nodes
    COLLECTIVE = 3  # no reshard nodes: functional collectives and local ops
    LOCAL = 4  # shapes are per device
    SCHEDULED = 5  # node order is the issue order


@dataclass(frozen=True)
class GraphFacts:
    """All that is known of a graph as a whole."""

    stage: Stage | None = None
    repeats: Repeats = field(default_factory=Repeats)  # layers that were left out


NOTHING = GraphFacts()


def graph_facts(gm: GraphModule) -> GraphFacts:
    """Return the record of `gm`."""
    return cast(GraphFacts, gm.meta.get(KEY, NOTHING))


def stage_of(gm: GraphModule) -> Stage:
    stage = graph_facts(gm).stage
    assert stage is not None, "a graph without a stage"
    return stage


def set_stage(gm: GraphModule, stage: Stage) -> None:
    gm.meta[KEY] = replace(graph_facts(gm), stage=Stage(stage))


def repeats_of(gm: GraphModule) -> Repeats:
    """Return what was left out of this graph; nothing for a graph that was not folded."""
    return graph_facts(gm).repeats


def set_repeats(gm: GraphModule, repeats: Repeats) -> None:
    gm.meta[KEY] = replace(graph_facts(gm), repeats=repeats)
