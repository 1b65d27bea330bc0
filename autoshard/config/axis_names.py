"""Decide by the name of a mesh axis whether the batch is split over it, if no recipe, input or plan says so."""

from __future__ import annotations

from autoshard.config.options import Options
from passes.errors import MeshError
from passes.ir.mesh import Mesh
from passes.recipes.context_parallel import CONTEXT_AXES, FSDP_CONTEXT
from passes.recipes.fsdp import FSDP
from passes.recipes.megatron import MEGATRON

# Names that PyTorch's tutorials, torchtitan (dp_replicate, dp_shard), MaxText (data, fsdp, pod) and Lightning (data_parallel)
# give to axes of the batch.
DATA_AXES = (
    "dp",
    "data",
    "batch",
    "ddp",
    "fsdp",
    "hsdp",
    "zero",
    "replicate",
    "replica",
    "shard",
    "dp_replicate",
    "dp_shard",
    "pod",
    "data_parallel",
)
TENSOR_AXES = ("tp", "tensor_parallel")  # torchtitan's and Megatron-LM's name, and Lightning's: its ranks share one batch


def batch_axes_of(options: Options, mesh: Mesh) -> tuple[int, ...]:
    """Return the axes that a caller splits the batch over with `recipe="auto"`, before there is a plan.

    Axes for the sequence (`cp`) do not split it. Axes of one rank and those named in `Options(inputs=...)` need no
    conventional name. Raises MeshError for any other axis whose name does not say whether the batch is split over it: `model`,
    `ep`, `x`.
    """
    constrained = {axis for axes in (options.inputs or {}).values() for axis in axes}
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        if size > 1 and name not in (*DATA_AXES, *TENSOR_AXES, *CONTEXT_AXES, *constrained):
            raise MeshError(_question(name, mesh))
    return tuple(axis for axis, name in enumerate(mesh.names) if name in DATA_AXES)


def _question(name: str, mesh: Mesh) -> str:
    known = {axis: usual_recipe(axis) for axis in mesh.names if axis != name}
    examples = [f"Options(recipe={known | {name: recipe}})" for recipe in (FSDP.name, MEGATRON.name)]
    return (
        f"nothing says whether the batch is split over axis {name!r} of the mesh {mesh}; give {examples[0]} if it is, "
        f"{examples[1]} or Options(inputs={{'*': {{{name!r}: 'R'}}}}) if every rank of it has the same batch, or a plan "
        f"(plan=...), or call the axis {DATA_AXES[0]!r}, {TENSOR_AXES[0]!r} or, for the sequence, {CONTEXT_AXES[0]!r}"
    )


def usual_recipe(name: str) -> str | None:
    """Return the usual recipe for an axis of this name; None if the name does not say what the axis is for."""
    if name in TENSOR_AXES:
        return MEGATRON.name
    if name in CONTEXT_AXES:
        return FSDP_CONTEXT[0].name
    return FSDP.name if name in DATA_AXES else None
