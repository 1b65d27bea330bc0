"""The partition of a joint graph into forward and backward, and the tags that say what is kept between them."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from passes._torch.graphs import module_of, no_code

_REGION = 0  # one for all that is tagged, as the partitioner saves what a higher region reads


def checkpoint_of(node: Node) -> tuple[int, bool] | None:
    """The number of the `torch.utils.checkpoint` call that a captured node is of, and whether its policy keeps the value."""
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


def min_cut_partition(
    joint: GraphModule, *, num_forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a joint graph with placeholders `primals_*` and `tangents_*`."""
    with no_code(), mock.patch.object(partitioners, "has_recomputable_rng_ops", _draws_again):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=num_forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )
    return module_of(forward.graph, forward), module_of(backward.graph, backward)


def _draws_again(joint: GraphModule) -> bool:
    """Whether the partitioner is to keep generators' states: attention counts as random for it, with dropout or without."""
    return False
