"""Estimate the bytes that recomputing values of a model's blocks frees and its cost, before any layout is chosen."""

from __future__ import annotations

from torch.fx import GraphModule

from passes.ir.graph import repeats_of
from passes.search.model.memory_budget import RecomputationCurve, recomputation_curve
from passes.search.model.node_costs import NodeCosts
from passes.search.model.skeleton import Skeleton
from passes.search.selective_recomputation import SelectiveRecomputation

KEPT_PARTS = (0.75, 0.5, 0.25, 0.0)  # of the bytes that blocks save: the points of the curve


def recomputation_savings(gm: GraphModule, skeleton: Skeleton, node_costs: NodeCosts) -> RecomputationCurve:
    """Return freed bytes per device and the seconds that they take, with saved values and work divided evenly among
    ranks."""
    members = [member for variable in skeleton.variables for member in variable.members]
    costs = {one.node: node_costs.costs(one.node, one.strategies) for one in members}
    seconds = {node.name: float(costs[leader][0][0, 0]) for node, leader in skeleton.leader.items() if leader in costs}
    saved = SelectiveRecomputation.of(gm.graph, repeats_of(gm), seconds)
    nbytes = sum(float(costs[one.node][2][0]) * one.count for one in members if one.is_saved and one.node.name in saved.names)
    if not nbytes or not saved.seconds:
        return ()
    ranks, least = node_costs.unit_costs.mesh.size, saved.recomputing(nbytes)
    points = [(nbytes * (1 - part), max(0.0, saved.recomputing(nbytes * part) - least)) for part in KEPT_PARTS]
    return recomputation_curve([(freed / ranks, took / ranks) for freed, took in points])
