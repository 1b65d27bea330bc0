"""Replace the calls that the backend has no kernel for by their decompositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import fake_mode_of, select_decompositions, trace_call
from passes.base import Pass, PassContext
from passes.ir.fake_calls import described, fake_call
from passes.ir.graph import (
    Stage,
    copy_facts,
    has_layout,
    is_recompute,
    item_of,
    layouts_of,
    note_of,
    operands,
    set_layouts,
    set_note,
    set_recompute,
    set_stands_for,
    set_value,
    stands_for,
    tensor_of,
    value_of,
)


@dataclass(frozen=True)
class Decompose(Pass):
    """Replace calls by their decompositions, for which Inductor has kernels.

    Capture keeps some ops whole because their sharding rule is simpler (`embedding_dense_backward`), and local forms use
    ops that read best (`masked_fill`). Ops that capture keeps whole for the backend stay whole.

    Before:

        mesh tp=2
        stage LOCAL
        %x: f32[4, 8] {tp:R} = input("x")
        %relu: f32[4, 8] {tp:R} = hardtanh(%x, 0.0, 6.0)
        return output("output") %relu

    After:

        mesh tp=2
        stage LOCAL
        %x: f32[4, 8] {tp:R} = input("x")
        %clamp_min: f32[4, 8] = clamp_min(%x, 0.0)
        %clamp_max: f32[4, 8] {tp:R} = clamp_max(%clamp_min, 6.0)
        return output("output") %clamp_max
    """

    name: ClassVar[str] = "decompose"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        table, whole = select_decompositions(whole=frozenset()), list[Any]()
        changed = False
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or node.target not in table:
                continue
            traced = _decomposed(node, table, whole)
            if traced is None:
                del table[node.target]
                whole.append(node.target)
            else:
                _inline(node, traced)
                changed = True
        return changed


MOST_CALLS = 1 << 14  # kept forms of calls; a model has some hundreds
_TRACED: dict[Any, GraphModule | None] = {}  # by the form of a call, as layers and the candidates of a search repeat it


def _decomposed(node: Node, table: dict[Any, Any], whole: list[Any]) -> GraphModule | None:
    """Return the decomposition of a call; None if it stays whole for its arguments, as those in `whole` do, which `table`
    lacks.
    """
    order = list(dict.fromkeys(operands(node)))
    places = tuple([order.index(operand) for operand in operands(node)])
    key = node.target, tuple(whole), torch.get_default_dtype(), places, described(node.args), described(node.kwargs)
    if key not in _TRACED:
        if len(_TRACED) == MOST_CALLS:
            _TRACED.clear()
        _TRACED[key] = _trace(node, table)
    return _TRACED[key]


def _trace(node: Node, table: dict[Any, Any]) -> GraphModule | None:
    values = {value: tensor_of(value) for value in operands(node)}
    with fake_mode_of([value_of(node), *values.values()]):
        traced = trace_call(node.target, node.args, node.kwargs, values, table)
    if any(new.target is node.target for new in traced.graph.nodes):
        return None
    for new in traced.graph.nodes:  # values belong to the fake mode of this graph, and are computed again in others
        for name in ("val", "tensor_meta"):
            new.meta.pop(name, None)
    return traced


def _inline(node: Node, traced: GraphModule) -> None:
    given = dict.fromkeys(operands(node))
    inner: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
    mode = fake_mode_of([value_of(node), *map(value_of, given)])
    with node.graph.inserting_before(node):
        for made in traced.graph.nodes:
            if made.op == "call_function":
                inner[made] = node.graph.node_copy(made, inner.__getitem__)
                copy_facts(node, inner[made])
                set_value(inner[made], fake_call(mode, made.target, inner[made].args, inner[made].kwargs))
                set_note(inner[made], note_of(node))
                set_recompute(inner[made], is_recompute(node))
    results = traced.graph.output_node().args[0]
    if isinstance(results, Node):
        _replace(node, inner[results])
        return
    assert isinstance(results, tuple | list)
    for user in list(node.users):
        item = item_of(user)
        assert item is not None
        chosen = results[item[1]]
        assert isinstance(chosen, Node)
        _replace(user, inner[chosen])
    node.graph.erase_node(node)


def _replace(node: Node, new: Node) -> None:
    if has_layout(node) and not has_layout(new):
        set_layouts(new, *layouts_of(node))
    set_stands_for(new, stands_for(node))
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
