"""Node tags that decide what the partitioner saves between forward and backward."""

from __future__ import annotations

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

_REGION = 0  # one region for all tags, as the partitioner saves values that a higher region reads


def checkpoint_of(node: Node) -> tuple[int, bool] | None:
    """Return the number of the `torch.utils.checkpoint` call around a node, and whether its policy saves the node."""
    if "recompute" not in node.meta or "ac_graph_id" not in node.meta:
        return None
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return int(node.meta["ac_graph_id"]), node.meta["recompute"] not in again


def clear_checkpoint(node: Node) -> None:
    """Remove the tags that `checkpoint_of` reads, so that the partitioner ignores them."""
    del node.meta["recompute"], node.meta["ac_graph_id"]


def tag_recompute(node: Node) -> None:
    """Keep the partitioner from saving `node` for the backward, which recomputes it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _REGION


def tag_save(node: Node) -> None:
    """Make the partitioner save `node` for the backward, if it is needed there."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
