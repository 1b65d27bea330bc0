"""The tags of a node that tell the partitioner what is kept between forward and backward."""

from __future__ import annotations

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

_REGION = 0  # one for all that is tagged, as the partitioner saves what a higher region reads


def checkpoint_of(node: Node) -> tuple[int, bool] | None:
    """Return the number of the `torch.utils.checkpoint` call that a node is captured in, and whether its policy keeps it."""
    if "recompute" not in node.meta or "ac_graph_id" not in node.meta:
        return None
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return int(node.meta["ac_graph_id"]), node.meta["recompute"] not in again


def clear_checkpoint(node: Node) -> None:
    """Take away what `checkpoint_of` reads, so that the partitioner does not."""
    del node.meta["recompute"], node.meta["ac_graph_id"]


def tag_recompute(node: Node) -> None:
    """Keep the partitioner from saving `node` for the backward: it is computed there again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _REGION


def tag_save(node: Node) -> None:
    """Make the partitioner save `node` for the backward, if it is needed there."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
