"""The lowering of a send for Inductor: a collective, whose operand stays in memory until it is awaited."""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

from passes._torch.operators.neighbours import SEND


def lower_sends() -> None:
    """Let Inductor compile sends, for the rest of the process."""
    constrain: Any = add_layout_constraint
    constrain(SEND, constrain_to_fx_strides)
    register: Any = register_lowering(SEND)
    register(_send)


def _send(part: Any, offset: int, group: str) -> Any:
    create: Any = ir._CollectiveKernel.create_out_of_place
    return ir.TensorBox.create(create(SEND, part, offset, group))
