"""Mixed precision: store parameters in one dtype, gather and compute in another, reduce gradients in a third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import fake_mode_of
from passes.base import Pass, PassContext
from passes.ir.graph import (
    InputRole,
    Output,
    OutputRole,
    Pin,
    Stage,
    add_call,
    add_pin,
    add_reshard,
    copy_facts,
    input_of,
    inserting_after,
    operands,
    origin_of,
    output_node,
    outputs_of,
    pins_of,
    placeholders,
    returned,
    set_note,
    set_origin,
    set_value,
    tensor_of,
    value_of,
)
from passes.ir.layout import R

_convert = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class CastParameters(Pass):
    """Make a graph captured in the compute dtype store parameters, and take inputs, in their own.

    1. A parameter (or input) is cast where it enters the graph, before its gather, so that fewer bytes move.
    2. Its gradient is cast to `reduce` before the reduction, and to the stored dtype after it.
    3. Floating-point outputs are cast to `outputs`, and their tangents have that dtype.

    This is what FSDP2's `MixedPrecisionPolicy` means by `param_dtype`, `reduce_dtype` and `output_dtype`.

    Before:

        mesh dp=2
        stage CAPTURED
        %w: bf16[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
        %x: bf16[4, 8] = input("x")
        %reshard: bf16[8, 6] pinned(dp:R "fsdp: gathered for use") = reshard(%w)
        %mm: bf16[4, 6] = mm(%x, %reshard)
        return output("output") %mm

    After:

        mesh dp=2
        stage CAPTURED
        %w: f32[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
        %x: bf16[4, 8] = input("x")
        %convert_element_type: bf16[8, 6] = prims.convert_element_type(%w, bf16)      # | cast_parameters: computed in bfloat16
        %reshard: bf16[8, 6] pinned(dp:R "fsdp: gathered for use") = reshard(%convert_element_type)
        %mm: bf16[4, 6] = mm(%x, %reshard)
        return output("output") %mm

    Context: CastParameters(stored=(("w", torch.float32),))
    """

    name: ClassVar[str] = "cast_parameters"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    stored: tuple[tuple[str, torch.dtype], ...] = ()  # parameters by FQN
    inputs: tuple[tuple[str, torch.dtype], ...] = ()  # floating-point inputs by path
    reduce: torch.dtype | None = None  # None: the compute dtype
    outputs: torch.dtype | None = None  # None: as computed

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        for role, dtypes in ((InputRole.PARAMETER, self.stored), (InputRole.INPUT, self.inputs)):
            nodes = {input_of(node).name: node for node in placeholders(gm.graph, role)}
            for name, dtype in dtypes:
                changed |= name in nodes and self._cast_input(nodes[name], dtype)
        stored = dict(self.stored) | {f"input:{name}": dtype for name, dtype in self.inputs}
        for position, (value, output) in enumerate(zip(returned(gm.graph), outputs_of(gm.graph), strict=True)):
            if isinstance(value, Node) and output.role is OutputRole.GRADIENT and output.name in stored:
                changed |= self._cast_gradient(gm, ctx, position, stored[output.name])
            if isinstance(value, Node) and output.role is OutputRole.OUTPUT and self.outputs is not None:
                changed |= self._cast_output(gm, position, self.outputs)
        return changed

    def _cast_input(self, node: Node, dtype: torch.dtype) -> bool:
        compute = tensor_of(node).dtype
        if compute == dtype:
            return False
        users = list(node.users)
        new = self._cast(node, node, compute)
        if users:
            set_origin(new, origin_of(min(users)))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        set_value(node, tensor_of(node).to(dtype))
        return True

    def _cast_output(self, gm: GraphModule, position: int, dtype: torch.dtype) -> bool:
        values = list(returned(gm.graph))
        value: Node = values[position]
        if tensor_of(value).dtype == dtype or not tensor_of(value).is_floating_point():
            return False
        values[position] = self._cast(value, value, dtype)
        output_node(gm.graph).args = (tuple(values),)
        name = outputs_of(gm.graph)[position].name
        for tangent in placeholders(gm.graph, InputRole.TANGENT):
            if input_of(tangent).name == name:
                self._cast_input(tangent, dtype)
                self._behind_forward(tangent)
        return True

    @staticmethod
    def _behind_forward(tangent: Node) -> None:
        """Move the cast to the first use of the tangent, where the backward begins."""
        cast = next(iter(tangent.users))
        if cast.users:
            min(cast.users).prepend(cast)

    def _cast_gradient(self, gm: GraphModule, ctx: PassContext, position: int, dtype: torch.dtype) -> bool:
        values = list(returned(gm.graph))
        value: Node = values[position]
        if tensor_of(value).dtype == dtype:
            return False
        reduce = self.reduce or tensor_of(value).dtype
        if reduce != tensor_of(value).dtype:
            value = self._cast(value, value, reduce)
        if reduce != dtype:
            value = self._cast(self._reduced(gm, ctx, value, outputs_of(gm.graph)[position]), value, dtype)
        values[position] = value
        output_node(gm.graph).args = (tuple(values),)
        return True

    def _reduced(self, gm: GraphModule, ctx: PassContext, value: Node, gradient: Output) -> Node:
        """Reduce `value` to the layout that its parameter is stored in."""
        owner = next(n for n in placeholders(gm.graph) if input_of(n) == gradient.partner)
        pinned = {pin.axis: pin.placement for pin in pins_of(owner)}
        new = add_reshard(value, f"{self.name}: reduced in {_name(tensor_of(value).dtype)}")
        for axis in range(ctx.mesh.ndim):
            add_pin(new, Pin(axis, pinned.get(axis, R), "mixed precision"))
        return new

    def _cast(self, value: Node, facts: Node, dtype: torch.dtype) -> Node:
        graph = value.graph
        with inserting_after(value):
            new = add_call(graph, _convert, (value, dtype), {})
        copy_facts(facts, new)
        with fake_mode_of([value_of(operands(new)[0])]):
            set_value(new, tensor_of(value).to(dtype))
        set_note(new, f"{self.name}: {'computed' if value.op == 'placeholder' else 'kept'} in {_name(dtype)}")
        return new


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
