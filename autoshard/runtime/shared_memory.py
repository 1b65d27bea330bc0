"""Reserve symmetric memory, which the ranks of a group access directly, for operators that send by themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import GraphModule

from autoshard.config.options import Options
from passes._torch import ALL_GATHER_MATMUL, reserve_symmetric_memory
from passes.errors import MeshError, UserError
from passes.ir.graph import operands, tensor_of
from passes.ir.matmul_chunks.one_operator import OPERATORS

DEVICES = ("cuda",)  # device types that can share memory


def check_devices(options: Options, device_type: str) -> None:
    """Raise UserError if symmetric memory is requested on devices that cannot share memory."""
    given = options.hiding
    if given is not None and given.symmetric_memory and device_type not in DEVICES:
        raise UserError(
            f"Options(overlap=Overlap(symmetric_memory=True)): the mesh is of {device_type} devices, and only CUDA's reach "
            "each other's memory; leave it out"
        )


def share_memory(graphs: Sequence[GraphModule]) -> None:
    """Set up the symmetric memory that these graphs need; all ranks call it together, before the first step.

    Raises MeshError if the ranks of a group do not reach each other's memory.
    """
    for group, nbytes in shared_bytes(graphs).items():
        try:
            reserve_symmetric_memory(group, nbytes)
        except RuntimeError as error:
            raise MeshError(
                f"the ranks of {group} do not reach each other's memory; leave out "
                f"Options(overlap=Overlap(symmetric_memory=True)), or put them on one node whose GPUs NVLink joins. ({error})"
            ) from error


def shared_bytes(graphs: Sequence[GraphModule]) -> dict[str, int]:
    """Return the bytes that each rank of a group shares, by the group's name, in an order that is equal on all ranks."""
    found: dict[str, int] = {}
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.target in OPERATORS:
                rows, other = (tensor_of(operand) for operand in operands(node)[:2])
                count, ranks, group = math.prod(rows.shape[:-1]), node.args[-2], str(node.args[-1])
                assert isinstance(ranks, int)
                # A gather shares this rank's part; a reduction shares the terms for two ranks.
                elements = rows.numel() if node.target is ALL_GATHER_MATMUL else 2 * count // ranks * other.shape[1]
                found[group] = max(found.get(group, 0), elements * rows.element_size())
    return dict(sorted(found.items()))
