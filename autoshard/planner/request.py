"""A request for a plan: one call of a module on global arguments, the mesh, and layouts that are decided already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from autoshard.capture.capture import Captured
from autoshard.config.constraints import check_options
from autoshard.config.options import Options
from autoshard.config.topology import equipped
from autoshard.plans.record import PlanRecord
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh


@dataclass(frozen=True, eq=False)
class EarlierProgram:
    """A program of the same module for another call: its CAPTURED and its LOCAL graph, with all layers, and its plan."""

    captured: Captured
    local: GraphModule
    plan: PlanRecord


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """A call of `module` with the global batch, to be planned for `mesh`.

    `stored` are the layouts of parameters from an earlier program of the same module. `batch_axes` are those that the
    caller splits the batch over, and no others (None: free to choose); one that they do not divide is padded. `is_later`:
    the inputs of the call are all constrained to how the caller splits them. `earlier` are plans of the same module for
    other calls; a search takes over what they decided. `programs` are those of other calls: one that differs in sizes only
    saves tracing and lowering most of many equal layers.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    options: Options = field(default_factory=Options)
    training: bool = True
    device: str = "cpu"
    stored: Mapping[str, Layout] | None = None
    batch_axes: tuple[int, ...] | None = None
    is_later: bool = False
    earlier: tuple[PlanRecord, ...] = ()
    programs: tuple[EarlierProgram, ...] = ()

    def checked(self) -> PlanRequest:
        """Return the request with the hardware of its mesh. Raises UserErrors for a mesh and options that cannot work.
        """
        mesh = equipped(self.mesh, self.options.hardware, self.device)
        check_options(self.options, mesh)
        return replace(self, mesh=mesh)
