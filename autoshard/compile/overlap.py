"""Reorder a partitioned program, forward and backward, so that computation hides as much communication as possible."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoshard.capture.garbage import uncollected
from autoshard.compile.compiled import Mode, Split
from autoshard.config.options import Options, Overlap
from autoshard.phases import OverlapPasses
from passes.base import Observer, PassContext, Remark
from passes.cost.optimizer_step import OPTIMIZER_STATES
from passes.ir.graph import input_of, placeholders, repeats_of, returned, value_of
from passes.ir.mesh import Mesh
from passes.manager import PassManager


@dataclass(frozen=True)
class OverlapPhase:
    """The ways in which communication is hidden, and the device memory that this may take."""

    mesh: Mesh
    memory_limit: int | None  # bytes at the peak of a step; None: no limit is given and the device's memory is unknown
    optimizer: str | None
    given: Overlap = field(default_factory=Overlap)

    @staticmethod
    def of(options: Options, mesh: Mesh) -> OverlapPhase | None:
        """Return the phase for these options; None: the program is not reordered."""
        given = options.hiding
        if given is None:
            return None
        is_known = mesh.hardware is not None or options.memory_limit is not None
        available = 0 if mesh.hardware is None else mesh.hardware.memory_bytes
        memory = options.memory_bytes(available) if is_known else None
        return OverlapPhase(mesh, memory, options.optimizer, given)

    def apply(self, split: Split, *, mode: Mode, observers: tuple[Observer, ...] = ()) -> tuple[Remark, ...]:
        """Split, bucket and order the messages of both graphs of `split`, in place."""
        ctx = PassContext(self.mesh)
        for gm in (split.forward, split.backward):
            if gm is not None:
                with uncollected():
                    PassManager(self._passes(split, gm, mode).passes, observers).run(gm, ctx)
        return tuple(ctx.remarks)

    def cut(self, split: Split, gm: GraphModule, *, mode: Mode) -> tuple[Remark, ...]:
        """Split messages of `gm`, one of the graphs of `split`, into chunks in place: the first step of `apply`.

        If the graph leaves out layers (`repeats_of`), the decision is made for all of them. Raises UnlikeLayersError
        if the remaining layers do not look alike.
        """
        ctx = PassContext(self.mesh)
        for one in self._passes(split, gm, mode).chunk:
            one.run(gm, ctx)
        return tuple(ctx.remarks)

    def _passes(self, split: Split, gm: GraphModule, mode: Mode) -> OverlapPasses:
        return OverlapPasses(
            memory_limit=None if self.memory_limit is None else max(0, self.memory_limit - self._beside(split, gm)),
            bucket_bytes=self.given.bucket_bytes,
            split_matmuls=self.given.split_matmuls,
            fused=mode == "inductor",
            symmetric_memory=self.given.symmetric_memory,
        )

    def _beside(self, split: Split, gm: GraphModule) -> int:
        """Return the bytes that a device holds while `gm` runs and that are not values of `gm`."""
        given, count = {input_of(node) for node in placeholders(gm.graph)}, repeats_of(gm).count
        others = zip(split.inputs, split.input_values, strict=True)
        total = sum(count(one.name) * _nbytes(value) for one, value in others if one not in given)
        gradients = () if split.backward is None else zip(split.gradients, returned(split.backward.graph), strict=True)
        states = sum(count(one.name) * _nbytes(value_of(node)) for one, node in gradients if isinstance(node, Node))
        return total + OPTIMIZER_STATES[self.optimizer] * states


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
