"""Pad dims that an axis does not divide, so that they can be sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.graph import Stage, input_of, note_of, tensor_of
from passes.ir.padding import Padded, padded_size
from passes.paddings.padded_calls import PaddedCalls
from passes.paddings.padded_inputs import padded_inputs
from passes.paddings.padded_parameters import padded_parameters
from passes.paddings.padded_positions import HALVES, padded_positions
from passes.paddings.padded_values import NOTE, Cut
from passes.recipes.megatron.linears import forward_nodes


@dataclass(frozen=True)
class Pad(Pass):
    """Pad the vocabulary, the heads and the widths that `parts` does not divide to a multiple of it, the batch to one of
    `batch_parts`, and the positions of attention to one of `sequence_parts`.

    1. The rows of embedding tables and the columns of linears are padded with zeros; of merged heads, whole heads. So is
       dim 0 of every input whose dim 0 is as long as that of the first input, and the dim of inputs that becomes positions.
       A remark says what was padded and how much that adds.
    2. What is made from padded values is longer, as far as the rules carry the index. Where the index is reduced, the
       padding is first overwritten with what the reduction ignores.
    3. Padded keys of attention are hidden by its causal order, or by a mask.
    4. Before any other call, and before the program returns, the padding is cut off: parameters, gradients and outputs
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
    batch_parts: int = 1
    sequence_parts: int = 1

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        positions = padded_positions(gm, self.sequence_parts) if self.sequence_parts > 1 else ()
        if positions:
            ctx.remark(self, positions[0].value, _inputs_text("a sequence of", positions[0], self._multiple(positions[0])))
            self._extend(gm, ctx, positions)
        found = padded_parameters(gm, self.parts) if self.parts > 1 else ()
        batch = padded_inputs(gm, self.batch_parts)
        for one in found:
            ctx.remark(self, one.user, _text(one, self.parts))
        if batch:
            ctx.remark(self, batch[0].value, _inputs_text("a batch of", batch[0], self.batch_parts))
        if found or batch:
            self._extend(gm, ctx, (*found, *batch))
        return bool(positions or found or batch)

    def _extend(self, gm: GraphModule, ctx: PassContext, padded: Sequence[Padded]) -> None:
        """Pad values, and all that is made from them. An input has one padding at a time."""
        calls = PaddedCalls(gm, ctx.mesh)
        calls.run([(one.value, one.padding, one.user) for one in padded])
        forward = set(forward_nodes(gm))
        for cut in calls.values.cuts:
            users = (user for user in cut.value.users if user in forward and not note_of(user).startswith(NOTE))
            if (user := next(users, None)) is not None:
                ctx.remark(self, user, _cut_text(cut, user))

    def _multiple(self, one: Padded) -> int:
        """Return what divides padded positions: twice the ranks, if that is why they are so many."""
        parts = self.sequence_parts
        return parts if one.padding.padded == padded_size(one.padding.digit.size, parts) else HALVES * parts


def _cut_text(cut: Cut, user: Node) -> str:
    op, padding = str(user.target).split(".")[1], cut.padding
    cut_to = f"{padding.padded} parts are cut to {padding.digit.size}"
    return f"{op} takes no padding: {cut_to}; ranks that shared them repeat its work"


def _inputs_text(what: str, one: Padded, parts: int) -> str:
    size, padded = one.padding.digit.size, one.padding.padded
    return f"{what} {size} is padded to {padded}, which {parts} divides: {padded / size - 1:.2%} more"


def _text(one: Padded, parts: int) -> str:
    digit, padded = one.padding.digit, one.padding.padded
    shape = list(tensor_of(one.value).shape)
    what = f"{digit.size} parts of {digit.inner} elements are" if digit.inner > 1 else f"{digit.size} is"
    name, more = f"{input_of(one.value).name}{shape}", f"{padded / digit.size - 1:.2%} more"
    return f"{name}: {what} padded to {padded}, which {parts} divides: {more}"
