"""Activation checkpointing: what the forward of a block keeps for the backward, and what the backward computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload
from passes.base import Pass, PassContext
from passes.cost.regions import is_alias, source_of
from passes.ir.blocks import Blocks
from passes.ir.graph import Saving, Stage, operands, output_node, results_of, set_saving, transfer_of
from passes.rules.rule import call_of


@dataclass(frozen=True)
class Checkpoint(Pass):
    """Of each block of a model (`passes/ir/blocks.py`), keep what leaves it and compute the rest again in the backward.

    1. What leaves a block is `saved`. Where it was gathered for those that take it, what was gathered is.
    2. What the backward needs of a block, and what that is computed from, is `remade`, collectives included, from what
       is saved: by this block, by those before it, or outside of all blocks, as the partitioner says.
    3. Values whose names are in `kept` are saved as well, and those of kernels that draw random numbers of their own
       (attention with dropout): once more, they would draw others.

    With `kept=None` nothing is said, and the partitioner keeps what is dear to compute.

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
        %permute: f32[8, 4]<1, 8> remade = permute(%relu, [1, 0])      # net.py:7 layers.0
        %mm_2: f32[8, 8] = mm(%permute, %mul)      # net.py:7 layers.0
        return output("output") %sin, gradient("layers.0.w") %mm_2

    Context: Checkpoint(())
    """

    name: ClassVar[str] = "checkpoint"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    kept: tuple[str, ...] | None = None  # kinds of values inside of blocks

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        if self.kept is None:
            return False
        blocks = Blocks.of(gm.graph)
        if not blocks.block:
            ctx.remark(self, output_node(gm.graph), "nothing is computed again: the model has no blocks to keep borders of")
            return False
        found = savings(blocks, frozenset(self.kept))
        for node, saving in found.items():
            set_saving(node, saving)
        return bool(found)


def savings(blocks: Blocks, kept: frozenset[str]) -> dict[Node, Saving]:
    """What is to be said of the values that the backward needs: those of blocks, in the order of the graph."""
    saved = {stored(node, blocks) for node in blocks.leaving()}
    saved |= {node for node, kind in blocks.kind.items() if kind in kept or _draws(node)}
    needed: set[Node] = set()
    late = {user for node in blocks.early for user in node.users if user not in blocks.early and user.op != "output"}
    waiting = [value for user in late for value in user.all_input_nodes if value in blocks.early]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in saved else node.all_input_nodes
    found: dict[Node, Saving] = {}
    for node in blocks.block:
        if node in needed and (node in saved or source_of(node) not in saved or not _is_item(node)):
            found[node] = "saved" if node in saved else "remade"
    return found


def _draws(node: Node) -> bool:
    """Whether a kernel draws random numbers."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    has_dropout = any(argument.name == "dropout_p" for argument in node.target._schema.arguments)
    return not has_dropout or bool(call_of(node).arg("dropout_p"))


def _is_item(node: Node) -> bool:
    return is_alias(node) and len(results_of(node.all_input_nodes[0])) > 1


def stored(node: Node, blocks: Blocks) -> Node:
    """What is kept for a value that leaves its block: the memory that it is a view of, or what that was gathered from."""
    found = at = source_of(node)
    while _is_moved(at) and blocks.block.get(source := source_of(operands(at)[0])) == blocks.block[node]:
        at = source
        found = at if _nbytes(at) < _nbytes(found) else found
    return found


def _is_moved(node: Node) -> bool:
    """Whether a value is a copy of its one operand, or of what all ranks have of it."""
    transfer = transfer_of(node)
    return node.target in _COPIES or (transfer is not None and transfer.kind == "all_gather")


_COPIES = (torch.ops.aten.clone.default, torch.ops._c10d_functional.wait_tensor.default)


def _nbytes(node: Node) -> int:
    return sum(result.numel() * result.dtype.itemsize for result in results_of(node))
