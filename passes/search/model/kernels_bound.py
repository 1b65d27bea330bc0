"""Bound the simulated step of every plan from below: kernels that run in all of them."""

from __future__ import annotations

from torch.fx import Node

from passes.cost.fused_regions import is_alias, is_generated
from passes.ir.graph import is_reshard
from passes.ir.padding import PADS
from passes.search.model.axis_groups import single_axes
from passes.search.model.node_costs import NodeCosts
from passes.search.model.step_structure import StepStructure
from passes.search.model.strategies import Strategies


def kernels_bound(structure: StepStructure, node_costs: NodeCosts) -> float:
    """Return the seconds of matrix products, attention, convolutions and updates, each split in its fastest way.

    The simulator prices these kernels alone and by the same formula, in every plan; it adds those that are fused, what
    is recomputed, and communication. All splits that rules allow count, also those that a search leaves out.
    """
    mesh = node_costs.unit_costs.mesh
    splits = Strategies(structure.rows, mesh, single_axes(mesh), splits_only=True)
    total = 0.0
    for node, alike in structure.alike.items():
        if _runs_alone(node):
            count = sum(structure.ties.count[one] for one in alike)
            total += count * min(node_costs.seconds_alone(node, split) for split in splits.of(node))
    return total


def _runs_alone(node: Node) -> bool:
    """Return whether a node is a kernel of its own in every plan; a parameter's is its update."""
    if node.op == "placeholder":
        return True
    return not (is_reshard(node) or is_alias(node) or is_generated(node) or node.target in PADS)
