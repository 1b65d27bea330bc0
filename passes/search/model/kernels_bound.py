"""Bound simulated steps from below, by kernels that run in every plan: split in the fastest way, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from passes.cost.fused_regions import is_alias, is_generated
from passes.ir.graph import is_reshard
from passes.ir.layout import replicated
from passes.ir.padding import PADS
from passes.search.model.axis_groups import single_axes
from passes.search.model.node_costs import NodeCosts
from passes.search.model.step_structure import StepStructure
from passes.search.model.strategies import Strategies, Strategy


def kernels_bound(structure: StepStructure, node_costs: NodeCosts) -> float:
    """Return the seconds of matrix products, attention, convolutions and updates, each split in its fastest way.

    The simulator prices these kernels alone and by the same formula, in every plan; it adds those that are fused, what
    is recomputed, and communication. All splits that rules allow count, also those that a search leaves out.
    """
    mesh = node_costs.unit_costs.mesh
    splits = Strategies(structure.rows, mesh, single_axes(mesh), splits_only=True)
    return _total(structure, lambda node: min(node_costs.seconds_alone(node, split) for split in splits.of(node)))


def replicated_bound(structure: StepStructure, node_costs: NodeCosts) -> float:
    """Return the seconds of the same kernels where each device computes everything."""
    mesh = node_costs.unit_costs.mesh
    splits = Strategies(structure.rows, mesh, single_axes(mesh), splits_only=True)

    def seconds(node: Node) -> float:
        split = next(iter(splits.of(node)))
        needs, results = ((replicated(mesh),) * len(layouts) for layouts in (split.needs, split.results))
        return node_costs.seconds_alone(node, Strategy(needs, results))

    return _total(structure, seconds)


def _total(structure: StepStructure, seconds: Callable[[Node], float]) -> float:
    counts = ((node, sum(structure.ties.count[one] for one in alike)) for node, alike in structure.alike.items())
    return sum(count * seconds(node) for node, count in counts if _runs_alone(node))


def _runs_alone(node: Node) -> bool:
    """Return whether a node is a kernel of its own in every plan; a parameter's is its update."""
    if node.op == "placeholder":
        return True
    return not (is_reshard(node) or is_alias(node) or is_generated(node) or node.target in PADS)
