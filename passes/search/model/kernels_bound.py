"""Bound the simulated step of every plan in the search space from below: kernels that run in all of them."""

from __future__ import annotations

import numpy as np
from torch.fx import Node

from passes.cost.fused_regions import is_alias, is_generated
from passes.ir.graph import is_reshard
from passes.search.model.node_costs import NodeCosts
from passes.search.model.skeleton import Skeleton, member_costs


def kernels_bound(skeleton: Skeleton, node_costs: NodeCosts) -> float:
    """Return the seconds of matrix products, attention, convolutions and updates, each with its fastest strategy.

    The simulator prices these kernels alone and by the same formula, in every plan; it adds those that are fused, what
    is recomputed, and communication.
    """
    total = 0.0
    for variable in skeleton.variables:
        rows = [member_costs(member, node_costs)[0] for member in variable.members if _runs_alone(member.node)]
        total += float(np.sum(rows, axis=0).min()) if rows else 0.0
    return total


def _runs_alone(node: Node) -> bool:
    """Return whether a node is a kernel of its own in every plan; a parameter's is its update."""
    if node.op == "placeholder":
        return True
    return not (is_reshard(node) or is_alias(node) or is_generated(node))
