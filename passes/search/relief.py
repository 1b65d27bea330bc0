"""What a search may count on freeing: values of a model's blocks that are computed again rather than kept."""

from __future__ import annotations

from torch.fx import GraphModule

from passes.ir.graph import repeats_of
from passes.search.draft import Draft
from passes.search.keep import Keep
from passes.search.kernels import Kernels
from passes.search.room import Relief, relief_of

PARTS = (0.75, 0.5, 0.25, 0.0)  # of what blocks keep: what may be all that is kept


def relief(gm: GraphModule, draft: Draft, kernels: Kernels) -> Relief:
    """Bytes of a device, and seconds for them, where all ranks share what is kept and the work."""
    parts = [part for variable in draft.variables for part in variable.parts]
    costs = {part.node: [float(one[0]) for one in kernels.costs(part.node, part.choices)] for part in parts}
    price = {node.name: costs[first][0] for node, first in draft.first.items() if first in costs}
    keep = Keep.of(gm.graph, repeats_of(gm), price)
    saved = sum(costs[part.node][2] * part.count for part in parts if part.is_saved and part.node.name in keep.names)
    if not saved or not keep.seconds:
        return ()
    ranks, least = kernels.prices.mesh.size, keep.remaking(saved)
    points = [(saved * (1 - part), max(0.0, keep.remaking(saved * part) - least)) for part in PARTS]
    return relief_of([(nbytes / ranks, seconds / ranks) for nbytes, seconds in points])
