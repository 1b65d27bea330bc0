"""Decide which values a model's blocks keep for the backward, and which the backward recomputes."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from passes.cost.fused_regions import node_nbytes, source_of
from passes.ir.collectives import KINDS
from passes.ir.graph import Saving, is_random, operands, transfer_of
from passes.ir.recompute_blocks import Blocks


def saved_or_remade(blocks: Blocks, kept: frozenset[str]) -> dict[Node, Saving]:
    """Return, for each value of a block that the backward needs, whether it is saved or remade, in graph order.

    Kinds in `kept` are saved although they do not leave their block.
    """
    saved = {stored(node, blocks) for node in blocks.leaving()}
    saved |= {node for node, kind in blocks.kind.items() if kind in kept or is_random(node)}
    needed: set[Node] = set()
    late = {user for node in blocks.forward for user in node.users if user not in blocks.forward and user.op != "output"}
    waiting = [value for user in late for value in user.all_input_nodes if value in blocks.forward]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in saved else node.all_input_nodes
    found: dict[Node, Saving] = {}
    for node in blocks.block:
        if node in needed and (node in saved or source_of(node) not in saved or node.target is not operator.getitem):
            found[node] = "saved" if node in saved else "remade"
    return found


def stored(node: Node, blocks: Blocks) -> Node:
    """Return the value to keep for one that leaves its block: the memory that it views, or the value before its
    gather."""
    found = at = source_of(node)
    while _is_moved(at) and blocks.block.get(source := source_of(operands(at)[0])) == blocks.block[node]:
        at = source
        found = at if node_nbytes(at) < node_nbytes(found) else found
    return found


def _is_moved(node: Node) -> bool:
    """Return whether a value is a copy of its one operand, or the operands of all ranks gathered."""
    transfer = transfer_of(node)
    return node.target in _COPIES or (transfer is not None and KINDS[transfer.kind].gathers)


_COPIES = (torch.ops.aten.clone.default, torch.ops._c10d_functional.wait_tensor.default)
