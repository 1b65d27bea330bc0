"""The partition of a joint graph into forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from passes._torch.graphs import module_of, no_code
from passes._torch.patches import replaced


def min_cut_partition(
    joint: GraphModule, *, num_forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward of a joint graph with placeholders `primals_*` and `tangents_*`."""
    with no_code(), replaced(partitioners, "has_recomputable_rng_ops", _draws_again):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=num_forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )
    return module_of(forward.graph, forward), module_of(backward.graph, backward)


def _draws_again(joint: GraphModule) -> bool:
    """Return False, so that no generator states are saved: the partitioner counts attention without dropout as
    random."""
    return False
