"""Choose which values of each block the forward saves for the backward, and which the backward recomputes.

This is also called activation checkpointing. This pass only marks the values; the partitioner does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from passes.base import Pass, PassContext
from passes.cost.saved_values import saved_or_remade
from passes.ir.graph import Stage, output_node, set_saving
from passes.ir.recompute_blocks import Blocks


@dataclass(frozen=True)
class Rematerialize(Pass):
    """Save the results of each block of a model (`passes/ir/recompute_blocks.py`), and recompute the rest in the backward.

    1. Results of a block are marked `saved`. If a result was gathered for its users, the value before the gather is
       saved instead.
    2. Values of a block that the backward needs, and their operands, are marked `remade`, collectives included. They
       are recomputed from saved values: of this block, of earlier ones, or outside of all blocks, where the partitioner
       decides.
    3. Values whose kinds are in `kept` are saved as well, and so are results of kernels that draw their own random
       numbers (attention with dropout), which would draw others.

    With `kept=None`, blocks are the calls of `torch.utils.checkpoint` in the user's program; everywhere else the
    partitioner saves what is expensive to compute.

    Before:

        mesh tp=2
        stage LOCAL
        %w: f32[8, 8] = parameter("layers.0.w")
        %x: f32[4, 8] = input("x")
        %tangent: f32[4, 8] = tangent("output")
        %mm: f32[4, 8] = mm(%x, %w)      # net.py:5 layers.0
        %relu: f32[4, 8] = relu(%mm)      # net.py:6 layers.0
        %mm_1: f32[4, 8] = mm(%relu, %w)      # net.py:7 layers.0
        %sin: f32[4, 8] = sin(%mm_1)      # net.py:9
        %cos: f32[4, 8] = cos(%mm_1)      # net.py:9
        %mul: f32[4, 8] = mul.Tensor(%tangent, %cos)      # net.py:9
        %permute: f32[8, 4]<1, 8> = permute(%relu, [1, 0])      # net.py:7 layers.0
        %mm_2: f32[8, 8] = mm(%permute, %mul)      # net.py:7 layers.0
        return output("output") %sin, gradient("layers.0.w") %mm_2

    After:

        mesh tp=2
        stage LOCAL
        %w: f32[8, 8] = parameter("layers.0.w")
        %x: f32[4, 8] = input("x")
        %tangent: f32[4, 8] = tangent("output")
        %mm: f32[4, 8] remade = mm(%x, %w)      # net.py:5 layers.0
        %relu: f32[4, 8] remade = relu(%mm)      # net.py:6 layers.0
        %mm_1: f32[4, 8] saved = mm(%relu, %w)      # net.py:7 layers.0
        %sin: f32[4, 8] = sin(%mm_1)      # net.py:9
        %cos: f32[4, 8] = cos(%mm_1)      # net.py:9
        %mul: f32[4, 8] = mul.Tensor(%tangent, %cos)      # net.py:9
        %permute: f32[8, 4]<1, 8> = permute(%relu, [1, 0])      # net.py:7 layers.0
        %mm_2: f32[8, 8] = mm(%permute, %mul)      # net.py:7 layers.0
        return output("output") %sin, gradient("layers.0.w") %mm_2

    Context: Rematerialize(())
    """

    name: ClassVar[str] = "rematerialize"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    kept: tuple[str, ...] | None = None  # kinds of values that are saved inside of blocks

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        blocks = Blocks.of_regions(gm.graph) if self.kept is None else Blocks.of(gm.graph)
        if not blocks.block and self.kept is not None:
            ctx.remark(self, output_node(gm.graph), "nothing is computed again: the model has no blocks to keep borders of")
        found = saved_or_remade(blocks, frozenset(self.kept or ()))
        for node, saving in found.items():
            set_saving(node, saving)
        return bool(found)
