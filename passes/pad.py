"""Pad dims that an axis does not divide, so that they can be sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from passes.base import Pass, PassContext
from passes.ir.graph import Stage, input_of, tensor_of
from passes.paddings.choice import Padded, padded_parameters
from passes.paddings.padded_calls import PaddedCalls


@dataclass(frozen=True)
class Pad(Pass):
    """Pad the vocabulary, the heads and the widths that `parts` does not divide to a multiple of it.

    1. The rows of embedding tables and the columns of linears are padded with zeros; of merged heads, whole heads.
       A remark says what was padded and how much that adds.
    2. What is made from padded values is longer, as far as the rules carry the index. Where the index is reduced, the
       padding is first overwritten with what the reduction ignores.
    3. Before any other call, and before the program returns, the padding is cut off: parameters, gradients and outputs
       have the sizes of the model.
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
        PaddedCalls(gm, ctx.mesh).run([(one.parameter, one.padding) for one in found])
        return True


def _text(one: Padded, parts: int) -> str:
    digit, padded = one.padding.digit, one.padding.padded
    shape = list(tensor_of(one.parameter).shape)
    unit = f" of {digit.inner} elements" if digit.inner > 1 else ""
    more = f"{padded / digit.size - 1:.2%} more"
    return f"{input_of(one.parameter).name}{shape}: {digit.size} parts{unit} are padded to {padded}, which {parts} divides: {more}"
