"""Pad dims that an axis does not divide, so that they can be sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from passes.base import Pass, PassContext
from passes.ir.graph import Stage, input_of, tensor_of
from passes.paddings.padded_calls import PaddedCalls
from passes.paddings.padded_parameters import Padded, padded_parameters


@dataclass(frozen=True)
class Pad(Pass):
    """Pad the vocabulary, the heads and the widths that `parts` does not divide to a multiple of it.

    1. The rows of embedding tables and the columns of linears are padded with zeros; of merged heads, whole heads.
       A remark says what was padded and how much that adds.
    2. What is made from padded values is longer, as far as the rules carry the index. Where the index is reduced, the
       padding is first overwritten with what the reduction ignores.
    3. Before any other call, and before the program returns, the padding is cut off: parameters, gradients and outputs
       have the sizes of the model.

    Before:

        mesh tp=4
        stage CAPTURED
        %w: f32[6, 8] = parameter("w")
        %x: f32[4, 8] = input("x")
        %permute: f32[8, 6]<1, 8> = permute(%w, [1, 0])
        %mm: f32[4, 6] = mm(%x, %permute)
        %exp: f32[4, 6] = exp(%mm)
        %sum_1: f32[4] = sum.dim_IntList(%exp, [1])
        return output("output") %sum_1

    After:

        mesh tp=4
        stage CAPTURED
        %w: f32[6, 8] = parameter("w")
        %x: f32[4, 8] = input("x")
        %pad_end: f32[8, 8] = autoshard.pad_end(%w, 0, 8)      # | pad: padded
        %permute: f32[8, 8]<1, 8> = permute(%pad_end, [1, 0])
        %mm: f32[4, 8] = mm(%x, %permute)
        %exp: f32[4, 8] = exp(%mm)
        %iota: i64[8] = prims.iota(8, start=0, step=1, dtype=i64, device=device(cpu), requires_grad=False)      # | pad: mask
        %lt: b8[8] = lt.Scalar(%iota, 6)      # | pad: mask
        %view: b8[1, 8] = view(%lt, [1, 8])      # | pad: mask
        %where: f32[4, 8] = where.ScalarOther(%view, %exp, 0)      # | pad: mask
        %sum_1: f32[4] = sum.dim_IntList(%where, [1])
        return output("output") %sum_1

    Context: Pad(parts=4)
    """

    name: ClassVar[str] = "pad"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    parts: int = 1

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        found = padded_parameters(gm, self.parts) if self.parts > 1 else ()
        if not found:
            return False
        for one in found:
            ctx.remark(self, one.user, _text(one, self.parts))
        PaddedCalls(gm, ctx.mesh).run([(one.parameter, one.padding, one.user) for one in found])
        return True


def _text(one: Padded, parts: int) -> str:
    digit, padded = one.padding.digit, one.padding.padded
    shape = list(tensor_of(one.parameter).shape)
    unit = f" of {digit.inner} elements" if digit.inner > 1 else ""
    name, more = f"{input_of(one.parameter).name}{shape}", f"{padded / digit.size - 1:.2%} more"
    return f"{name}: {digit.size} parts{unit} are padded to {padded}, which {parts} divides: {more}"
