"""Insert a reshard wherever a consumer needs another layout than the producer gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.graph import (
    Stage,
    copy_facts,
    has_needs,
    inserting_after,
    is_reshard,
    is_tensor,
    layout_of,
    needs_of,
    operands,
    outputs_of,
    reshard,
    returned,
    set_layouts,
    set_needs,
    set_note,
    set_operands,
    set_value,
    value_of,
)
from passes.ir.layout import Layout


@dataclass(frozen=True)
class InsertReshards(Pass):
    """Insert a `reshard` before every operand whose layout is not the one needed.

    Consumers of one value that need the same layout share one reshard.

    Before:

        mesh tp=2
        stage PLACED
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %w: f32[8, 6] {tp:S(1)} = parameter("w")
        %mm: f32[4, 6] {tp:S(1)} = mm(%x{tp:R}, %w)
        return output("output") %mm

    After:

        mesh tp=2
        stage EXPLICIT
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %w: f32[8, 6] {tp:S(1)} = parameter("w")
        %reshard: f32[4, 8] {tp:R} = reshard(%x)      # | insert_reshards: mm needs {tp:R}
        %mm: f32[4, 6] {tp:S(1)} = mm(%reshard, %w)
        return output("output") %mm
    """

    name: ClassVar[str] = "insert_reshards"
    takes: ClassVar[Stage] = Stage.PLACED
    gives: ClassVar[Stage] = Stage.EXPLICIT

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        made: dict[tuple[Node, Layout], Node] = {}
        for node in list(gm.graph.nodes):
            if is_reshard(node) or not has_needs(node):
                continue
            edges = zip(operands(node), needs_of(node), strict=True)
            news = [self._resharded(node, *edge, ctx, made) for edge in edges]
            set_operands(node, news)
        return bool(made)

    def _resharded(
        self, user: Node, value: Node, need: Layout, ctx: PassContext, made: dict[tuple[Node, Layout], Node]
    ) -> Node:
        if not is_tensor(value) or layout_of(value) == need:
            return value
        if (value, need) not in made:
            with inserting_after(value):
                new = user.graph.call_function(reshard, (value,))
            copy_facts(value if user.op == "output" else user, new)
            set_value(new, value_of(value))
            set_layouts(new, need)
            set_needs(new, (layout_of(value),))
            set_note(new, f"{self.name}: {_name(user, value)} needs {need.format(ctx.mesh)}")
            made[value, need] = new
        return made[value, need]


def _name(user: Node, value: Node) -> str:
    if user.op != "output":
        return str(user.target).removeprefix("aten.").removesuffix(".default")
    return outputs_of(user.graph)[returned(user.graph).index(value)].role.value
